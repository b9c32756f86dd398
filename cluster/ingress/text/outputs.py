"""The answers of one request side by side, and the choice among samples where more are made than given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.core.errors import TargetUnavailable
from cluster.core.request import Commit, GenerationRequest
from cluster.ingress.text.output import Answer, Delta, Finished
from cluster.ingress.text.tokenizer import Detokenizer


class Answers:
    """Turns commits into events, each answer's in its order, until all answers have ended."""

    __slots__ = ("_answers",)

    def __init__(self, request: GenerationRequest, stream: Callable[[], Detokenizer]) -> None:
        self._answers = [Answer(request, stream(), index) for index in range(request.n)]

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return all(answer.finished is not None for answer in self._answers)

    def take(self, commit: Commit) -> tuple[Delta | Finished, ...]:
        """What the commit adds; nothing once its answer has ended. Raises `TargetUnavailable` for an unknown answer."""
        if not 0 <= commit.index < len(self._answers):
            raise TargetUnavailable(f"answer {commit.index} was not asked for")
        return self._answers[commit.index].take(commit)


def choose(events: Sequence[Delta | Finished], count: int, *, logprobs: bool) -> list[Delta | Finished]:
    """The events of the `count` best answers, one answer after the other, numbered anew, best first.

    Answers go by the mean log-probability of their tokens, then by their index. `logprobs` keeps
    these in the events.
    """
    answers: dict[int, list[Delta | Finished]] = {}
    for event in events:
        answers.setdefault(event.index, []).append(event)
    ranked = sorted(answers, key=lambda index: (-_mean_logprob(answers[index]), index))
    return [
        replace(event, index=place, logprobs=event.logprobs if logprobs else ())
        if isinstance(event, Delta)
        else replace(event, index=place)
        for place, index in enumerate(ranked[:count])
        for event in answers[index]
    ]


def _mean_logprob(answer: Sequence[Delta | Finished]) -> float:
    """Of its tokens; minus infinity where there are none."""
    values = [entry.logprob for event in answer if isinstance(event, Delta) for entry in event.logprobs]
    return math.fsum(values) / len(values) if values else -math.inf
