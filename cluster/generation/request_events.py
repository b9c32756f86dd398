"""The events of one request: what its client reads after each commit of the engine, and after the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cluster.coordinator.coordinator import Coordinator
from cluster.core.errors import InvalidRequest, TargetUnavailable
from cluster.core.request import Commit, GenerationRequest, TokenLogprobs
from cluster.generation.events import Delta, Event, Finished, Started
from cluster.generation.recent_answers import RecentAnswers, request_key
from cluster.generation.resume import ReceivedPart, ending
from cluster.generation.text.output_processor import OutputProcessor
from cluster.generation.text.tokenizer import Tokenizer
from cluster.generation.validate import ValidatedRequest


class RequestEvents:
    """Converts the commits of a request to events until all of its answers have ended.

    A resumed request continues after what its caller has: with its tokens, else the stored ones, else from the start.
    Where the best of several answers are returned, all events follow the last commit.
    """

    def __init__(
        self,
        valid: ValidatedRequest,
        request: GenerationRequest,
        started: Started,
        tokenizer: Tokenizer,
        engine: Coordinator,
        recent: RecentAnswers,
    ) -> None:
        """`started` is the first event; the first commits complete it. `recent` stores the tokens of the answers.

        Raises `InvalidRequest` (`resume`) for tokens after the end of an answer.
        """
        self._valid = valid
        self._engine = engine
        self._recent = recent
        self._key = request_key(request)
        received = valid.received if request.beam is None and not valid.answers.selects_best else ()
        parts = tuple(
            part.generated(part.tokens or recent.tokens(self._key, index)) for index, part in enumerate(received)
        )
        recent.begin(self._key, [part.tokens for part in parts] or [()] * request.n)
        request = replace(request, resumed=parts)
        detokenizers = [
            tokenizer.detokenizer(
                skip_special_tokens=request.text.skip_special_tokens,
                starts_text=bool(request.source),  # an answer to a source does not continue a text
                kept=frozenset(request.text.kept_special_ids),
            )
            for _ in range(request.n)
        ]
        self._outputs = [OutputProcessor(request, one, index) for index, one in enumerate(detokenizers)]
        self._running = set(request.open_answers)
        self._started: Started | None = started  # until it is returned
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._queue_seconds: float | None = None
        self._waiting: list[Delta | Finished] = self._resume(request, received)
        parts = tuple(replace(part, is_finished=index not in self._running) for index, part in enumerate(parts))
        self.request = replace(request, resumed=parts)
        """The request to the engine."""

    def have_ended(self) -> bool:
        """Whether all answers have ended."""
        return not self._running

    def take(self, commit: Commit) -> list[Event]:
        """Process a commit. Returns the events to send now; those of the last commit come with `rest`.

        Raises `TargetUnavailable` for an answer that was not requested.
        """
        self._recent.append(self._key, commit.index, commit.tokens)
        if not 0 <= commit.index < len(self._outputs):
            raise TargetUnavailable(f"answer {commit.index} was not requested")
        self._prompt_logprobs += commit.prompt_logprobs
        self._queue_seconds = commit.queue_seconds if self._queue_seconds is None else self._queue_seconds
        events = self._outputs[commit.index].process(commit)
        self._engine.count_sent(sum(len(event.tokens) for event in events if isinstance(event, Delta)))
        if events and isinstance(events[-1], Finished):
            self._running.discard(commit.index)
            if commit.finish is None:
                self._engine.conclude(self.request.request_id, commit.index)
        self._waiting += events
        return [] if self.have_ended() or self._valid.answers.selects_best or not self._waiting else self._released()

    def rest(self) -> list[Event]:
        """Return the events after the last commit. Raises `TargetUnavailable` if an answer has not ended."""
        if not self.have_ended():
            raise TargetUnavailable(f"the answer to {self.request.request_id} broke off")
        answers = self._valid.answers
        if answers.selects_best:
            has_logprobs = self._valid.sampling.logprobs is not None
            self._waiting = best_answers(self._waiting, answers.returned, logprobs=has_logprobs)
        return self._released()

    def _released(self) -> list[Event]:
        """Return the events that wait, behind `Started` if they are the first ones."""
        started, self._started = self._started, None
        events, self._waiting = self._waiting, []
        begin: list[Event] = []
        if started is not None:
            begin = [replace(started, prompt_logprobs=self._prompt_logprobs, queue_seconds=self._queue_seconds)]
        return begin + [self._reported(event) for event in events]

    def _reported(self, event: Delta | Finished) -> Delta | Finished:
        """Return the event, with the most tokens of an answer that has room for fewer than the client asked for."""
        most = self.request.stopping.max_tokens
        if isinstance(event, Finished) and most < (self._valid.max_tokens or 0):
            return replace(event, reduced_max_tokens=most)
        return event

    def _resume(self, request: GenerationRequest, received: Sequence[ReceivedPart]) -> list[Delta | Finished]:
        """Continue the answers after what the caller has of them. Returns the ends that it does not have.

        The parts of `request.resumed` are known; the rest of what the caller has is generated again.
        """
        ends: list[Delta | Finished] = []
        for index, part in enumerate(request.resumed):
            output = self._outputs[index]
            if part.is_finished:
                continue
            end = output.resume(part, ending(part.tokens, request.stopping), received[index].count - len(part.tokens))
            if output.token_count < len(part.tokens):
                raise InvalidRequest(f"resume[{index}].token_ids", "", "without tokens after a stop string")
            if end is not None:
                ends.append(end)
                self._running.discard(index)
        return ends


def best_answers(events: Sequence[Delta | Finished], count: int, *, logprobs: bool) -> list[Delta | Finished]:
    """Return the events of the `count` best answers, best first, numbered anew from 0.

    An answer's score is the mean log-probability of its tokens; of equal scores, the lower index comes first. Answers
    with the same tokens have one score, although each was computed in other batches, which round otherwise.
    Without `logprobs` the log-probabilities are removed from the events.
    """
    answers: dict[int, list[Delta | Finished]] = {}
    for event in events:
        answers.setdefault(event.index, []).append(event)
    known: dict[tuple[int, ...], float] = {}
    scores = {
        index: known.setdefault(_tokens(answers[index]), _mean_logprob(answers[index])) for index in sorted(answers)
    }
    ranked = sorted(scores, key=lambda index: (-scores[index], index))
    return [
        replace(event, index=rank, logprobs=event.logprobs if logprobs else ())
        if isinstance(event, Delta)
        else replace(event, index=rank)
        for rank, index in enumerate(ranked[:count])
        for event in answers[index]
    ]


def _tokens(answer: Sequence[Delta | Finished]) -> tuple[int, ...]:
    return tuple(token for event in answer if isinstance(event, Delta) for token in event.tokens)


def _mean_logprob(answer: Sequence[Delta | Finished]) -> float:
    """Return the mean log-probability of the answer's tokens; minus infinity for an answer without tokens."""
    values = [entry.logprob for event in answer if isinstance(event, Delta) for entry in event.logprobs]
    return math.fsum(values) / len(values) if values else -math.inf
