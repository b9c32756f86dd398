"""Resuming a request: what its caller has of each answer, and what is left to generate and to send.

A call that broke off is sent again with the same seed and the number of tokens received, or the tokens themselves. The
answer is a pure function of the request and the seed, so its continuation is what the first call would have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core import bounds
from cluster.core.config.sections import LimitsSection
from cluster.core.draft_origin import NO_ORIGINS, OriginCounts
from cluster.core.errors import InvalidRequest
from cluster.core.request import FinishReason, GeneratedPart, StoppingCriteria
from cluster.core.verification import TargetInfo
from cluster.generation.answer_count import AnswerCount
from pilotfish.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class ReceivedPart:
    """What the caller has of one answer."""

    count: int = 0
    """Number of tokens received."""
    tokens: tuple[int, ...] = ()
    """The tokens received; empty if the caller does not send them."""
    is_finished: bool = False
    """Whether the end of the answer was received."""
    drafted_tokens: int = 0
    """Sum of `Delta.drafted` over the deltas received."""
    accepted_tokens: int = 0
    """Sum of `Delta.accepted` over the deltas received."""
    target_steps: int = 0
    """Number of deltas with tokens received."""
    accepted_by_origin: OriginCounts = NO_ORIGINS
    """Sum of `Delta.origins` over the deltas received."""

    def generated(self, known: Sequence[int]) -> GeneratedPart:
        """Return what need not be generated again, given the first `known` tokens of the answer."""
        if len(known) < self.count:  # the counts cover tokens that are generated again
            return GeneratedPart(tuple(known), self.is_finished)
        return GeneratedPart(
            tuple(known[: self.count]),
            self.is_finished,
            self.drafted_tokens,
            self.accepted_tokens,
            self.target_steps,
            self.accepted_by_origin,
        )


NOTHING_RECEIVED = ReceivedPart()


def received_parts(
    request: generation_pb2.GenerateRequest, answers: AnswerCount, info: TargetInfo, limits: LimitsSection
) -> tuple[ReceivedPart, ...]:
    """Check what the caller has of the answers: one part per answer, or none for a new request.

    Raises `InvalidRequest` (`resume…`).
    """
    if not request.resume:
        return ()
    if not request.sampling.HasField("seed"):
        raise InvalidRequest("resume", f"{len(request.resume)} entries", "sent with the seed of the first call")
    bounds.count("resume", request.resume, 0, answers.returned)
    parts: dict[int, ReceivedPart] = {}
    for position, message in enumerate(request.resume):
        field = f"resume[{position}]"
        index = bounds.integer(f"{field}.index", message.index, 0, answers.returned - 1)
        if index in parts:
            raise InvalidRequest(f"{field}.index", index, "in one entry only")
        part = parts[index] = _part(message, field, info, limits)
        if (answers.selects_best or answers.beam is not None) and (part.count or part.is_finished):
            raise InvalidRequest(
                f"{field}.token_count", part.count, "0 with best_of or beam search: no answer is sent before the end"
            )
    return tuple(parts.get(index, NOTHING_RECEIVED) for index in range(answers.engine_n))


def check_lengths(parts: Sequence[ReceivedPart], max_tokens: int) -> None:
    """Refuse parts that are longer than an answer may be. Raises `InvalidRequest` (`resume…`)."""
    for index, part in enumerate(parts):
        bounds.integer(f"resume[{index}].token_count", part.count, 0, max_tokens)


def ending(tokens: Sequence[int], stopping: StoppingCriteria) -> FinishReason | None:
    """Return why an answer with these tokens has ended, stop strings aside; `None` if it goes on.

    Raises `InvalidRequest` (`resume`) for tokens after the one that ends it.
    """
    stops = stopping.stop_token_ids
    early = next((token for token in tokens[:-1] if token in stops), None)
    if early is not None:
        raise InvalidRequest("resume", early, "without tokens after one that ends the answer")
    return stopping.finish_after(tokens[-1], len(tokens)) if tokens else None


def _part(message: generation_pb2.ResumedAnswer, field: str, info: TargetInfo, limits: LimitsSection) -> ReceivedPart:
    count = bounds.integer(
        f"{field}.token_count", message.token_count, 0, limits.max_output_tokens or info.max_context_len
    )
    if message.token_ids and len(message.token_ids) != count:
        raise InvalidRequest(f"{field}.token_ids", f"{len(message.token_ids)} tokens", f"none or {count} tokens")
    most_drafted = bounds.MAX_TREE_NODES * count
    drafted = bounds.integer(f"{field}.drafted_tokens", message.drafted_tokens, 0, most_drafted)
    accepted = bounds.integer(f"{field}.accepted_draft_tokens", message.accepted_draft_tokens, 0, min(count, drafted))
    return ReceivedPart(
        count,
        bounds.tokens(f"{field}.token_ids", message.token_ids, 0, count, info.vocabulary_size),
        message.finished,
        drafted,
        accepted,
        bounds.integer(f"{field}.target_steps", message.target_steps, 0, count),
        _origin_counts(message.accepted_by_origin, f"{field}.accepted_by_origin", accepted),
    )


def _origin_counts(message: common_pb2.OriginCounts, field: str, accepted: int) -> OriginCounts:
    """Check that the counts are together at most the accepted draft tokens. Raises `InvalidRequest`."""
    counts = (message.request, message.earlier, message.trained, message.forced)
    bounds.integer(field, sum(counts), 0, accepted)
    return OriginCounts(*counts)
