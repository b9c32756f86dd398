"""One token sequence: the prompt, the answer so far, and what the target stores of it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, ListedTokens, RowFaultCode
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.request import (
    Commit,
    FinishReason,
    GeneratedPart,
    GenerationRequest,
    SequenceStart,
    TokenLogprobs,
    Usage,
)
from cluster.core.verification import Verdict


class Sequence:
    """Prompt and answer so far, and how much of it the target stores.

    Only `commit` changes the tokens. `opened` records what the target holds and never changes the answer.
    """

    __slots__ = (
        "_accepted",
        "_accepted_by_origin",
        "_cached_len",
        "_drafted",
        "_longest",
        "_prompt_logprobs",
        "_resumed_len",
        "_steps",
        "_stored_len",
        "arrival",
        "finish",
        "following",
        "forced",
        "id",
        "request",
        "tokens",
    )

    def __init__(self, sequence_id: SequenceId, request: GenerationRequest, arrival: int) -> None:
        self.id = sequence_id
        self.request = request
        self.arrival = arrival
        """Order of arrival: older sequences go first, and a preempted one keeps its number."""
        part = request.resumed[0] if request.resumed else GeneratedPart()
        self.tokens: list[int] = [*request.prompt, *part.tokens]
        self.finish: FinishReason | None = None
        self.forced: tuple[int, ...] = ()
        """Tokens that follow because the grammar allows no other ones. They are drafts that are certainly accepted."""
        self.following: ListedTokens | None = None
        """What the grammar allows after `forced`, as far as it is known."""
        self._longest = len(request.prompt) + request.stopping.max_tokens
        self._stored_len = 0
        self._cached_len: int | None = None
        self._resumed_len = len(part.tokens)
        self._drafted = part.drafted_tokens
        self._accepted = part.accepted_tokens
        self._accepted_by_origin = part.accepted_by_origin
        self._steps = part.target_steps
        self._prompt_logprobs: list[TokenLogprobs] | None = [] if request.sampling.prompt_logprobs is not None else None
        """Log-probabilities of prompt tokens that have arrived and are not committed yet; `None` if none are wanted."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def stored_len(self) -> int:
        """Leading tokens whose KV the target holds; fewer than `len(self)` until the sequence finishes."""
        return self._stored_len

    @property
    def missing(self) -> int:
        """Committed tokens without stored KV: 1 while decoding, more during prefill."""
        return len(self.tokens) - self._stored_len

    @property
    def remaining(self) -> int:
        """Number of tokens that the answer may still get."""
        return self._longest - len(self.tokens)

    @property
    def start(self) -> SequenceStart:
        """The parameters of the sequence for its first row on a worker."""
        request = self.request
        return SequenceStart(
            self.prompt_len,
            request.sampling,
            request.cache_salt,
            request.prediction,
            request.source,
            request.allows_learning,
        )

    def usage(self) -> Usage:
        """Token and step counts of the answer so far."""
        return Usage(
            prompt_tokens=len(self.request.input),
            completion_tokens=len(self.tokens) - self.prompt_len,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            target_steps=self._steps,
            resumed_tokens=self._resumed_len,
            cached_tokens=self._cached_len or 0,
            accepted_by_origin=self._accepted_by_origin,
        )

    def opened(self, stored_len: int) -> None:
        """Record that the target holds the first `stored_len` tokens: after an opening, or 0 after a loss or release.

        Raises `InvalidRequest` unless at least one token is left to send. A finished sequence stays unchanged.
        """
        if not 0 <= stored_len < len(self.tokens):
            raise InvalidRequest("stored_len", stored_len, f"between 0 and {len(self.tokens) - 1}")
        if self.finish is None:
            self._stored_len = stored_len

    def commit(self, verdict: Verdict, origins: tuple[DraftOrigin, ...] = ()) -> Commit | None:
        """Add the tokens of a verdict. Returns what it added to the answer, or `None` for nothing.

        `origins` says where each of its accepted draft tokens comes from.
        A verdict for an unexpected length is dropped. After the fault `OUT_OF_SYNC`, the sequence is sent again from
        its start.
        """
        if self.finish is not None:
            return None
        if verdict.fault is not None:
            if verdict.fault.code is RowFaultCode.OUT_OF_SYNC:
                self._stored_len = 0
            return None
        if not self._stored_len < verdict.base_len <= len(self.tokens):
            return None
        if bool(verdict.tokens) != (verdict.base_len == len(self.tokens)):
            return None  # the verdict decides before the end of the sequence, or does not decide at its end
        if self._cached_len is None:
            self._cached_len = min(self._stored_len, self.prompt_len)
        self._note_prompt(verdict)
        if not verdict.tokens:
            self._stored_len = verdict.base_len
            return None
        tokens, finish = self._until_stop(verdict.tokens)
        logprobs = verdict.logprobs[: len(tokens)]
        accepted = min(verdict.accepted, len(tokens))
        forced = self.request.stopping.forced_eos_token_id
        if finish is FinishReason.LENGTH and forced is not None:
            accepted = min(accepted, len(tokens) - 1)
            tokens = (*tokens[:-1], forced)
            logprobs = (*logprobs[:-1], TokenLogprobs(forced, 0.0)) if logprobs else ()
        self._stored_len = verdict.base_len + verdict.accepted
        self._drafted += verdict.drafted
        self._accepted += accepted
        self._accepted_by_origin = self._accepted_by_origin.plus(origins[:accepted])
        self._steps += 1
        self.tokens.extend(tokens)
        self.finish = finish
        self.forced, self.following = ((), None) if finish is not None else (verdict.forced, verdict.following)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return Commit(
            tokens=tokens,
            accepted=accepted,
            logprobs=logprobs,
            finish=finish,
            usage=self.usage() if finish is not None else None,
            drafted=verdict.drafted,
            prompt_logprobs=tuple(prompt_logprobs or ()),
            cached_tokens=self._cached_len or 0,
            origins=origins[:accepted],
        )

    def _note_prompt(self, verdict: Verdict) -> None:
        """Keep what a verdict says of the prompt. A prompt that is sent again repeats what is known."""
        if self._prompt_logprobs is not None:
            known = len(self._prompt_logprobs) - max(0, self._stored_len - 1)
            self._prompt_logprobs.extend(verdict.prompt_logprobs[known:])

    def _until_stop(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Cut the tokens after the first stop token or at the length bound, and say which ended the answer."""
        stopping, remaining = self.request.stopping, self.remaining
        if not stopping.stop_token_ids.isdisjoint(tokens):
            before = len(self.tokens) - self.prompt_len
            for count, token in enumerate(tokens[:remaining], start=1):
                if (finish := stopping.finish_after(token, before + count)) is not None:
                    return tokens[:count], finish
        if len(tokens) >= remaining:
            return tokens[:remaining], FinishReason.LENGTH
        return tokens, None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence to draft for, and how large its tree may be. An empty budget only brings the drafter up to date."""

    sequence: Sequence
    budget: DraftBudget
