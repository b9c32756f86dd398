"""All answers of one request, and the choice of the best where more are generated than returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.core.errors import InvalidRequest, TargetUnavailable
from cluster.core.request import Commit, GenerationRequest
from cluster.generation.events import Delta, Finished
from cluster.generation.resume import ReceivedPart, ending
from cluster.generation.text.output_processor import OutputProcessor
from cluster.generation.text.tokenizer import Detokenizer


class RequestProcessor:
    """Converts the commits of a request to events until all of its answers have ended."""

    __slots__ = ("_outputs", "_running")

    def __init__(self, request: GenerationRequest, new_detokenizer: Callable[[], Detokenizer]) -> None:
        self._outputs = [OutputProcessor(request, new_detokenizer(), index) for index in range(request.n)]
        self._running = set(request.open_answers)

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return not self._running

    def resume(self, request: GenerationRequest, received: Sequence[ReceivedPart]) -> tuple[Finished, ...]:
        """Continue the answers after what the caller has of them. Returns the ends that it does not have.

        The parts of `request.resumed` are known; the rest of what the caller has is generated again. Raises
        `InvalidRequest` (`resume`) for tokens after the end of an answer.
        """
        ends: list[Finished] = []
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
        return tuple(ends)

    @property
    def running(self) -> frozenset[int]:
        """The indices of the answers that have not ended."""
        return frozenset(self._running)

    def process(self, commit: Commit) -> tuple[Delta | Finished, ...]:
        """Return the events of one commit; none once its answer has ended.

        Raises `TargetUnavailable` for an answer that was not requested.
        """
        if not 0 <= commit.index < len(self._outputs):
            raise TargetUnavailable(f"answer {commit.index} was not requested")
        events = self._outputs[commit.index].process(commit)
        if events and isinstance(events[-1], Finished):
            self._running.discard(commit.index)
        return events


def best_answers(events: Sequence[Delta | Finished], count: int, *, logprobs: bool) -> list[Delta | Finished]:
    """Return the events of the `count` best answers, best first, numbered anew from 0.

    An answer's score is the mean log-probability of its tokens; of equal scores, the lower index comes first.
    Without `logprobs` the log-probabilities are removed from the events.
    """
    answers: dict[int, list[Delta | Finished]] = {}
    for event in events:
        answers.setdefault(event.index, []).append(event)
    ranked = sorted(answers, key=lambda index: (-_mean_logprob(answers[index]), index))
    return [
        replace(event, index=rank, logprobs=event.logprobs if logprobs else ())
        if isinstance(event, Delta)
        else replace(event, index=rank)
        for rank, index in enumerate(ranked[:count])
        for event in answers[index]
    ]


def _mean_logprob(answer: Sequence[Delta | Finished]) -> float:
    """Return the mean log-probability of the answer's tokens; minus infinity for an answer without tokens."""
    values = [entry.logprob for event in answer if isinstance(event, Delta) for entry in event.logprobs]
    return math.fsum(values) / len(values) if values else -math.inf
