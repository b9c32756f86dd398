"""Parallel sampling: `n` answers to one prompt."""

from __future__ import annotations

from dataclasses import replace

from cluster.coordinator.requests.decoding_strategy import NewSequence, StrategyStep
from cluster.core.request import Commit, GenerationRequest


class ParallelSampling:
    """`n` answers that share a prompt. The first sequence computes the prompt; the others fork once it is stored.

    Answer `i` is sampled with the request's seed plus `i`, modulo 2**64, so it equals the answer of a separate request.
    The answers of a resumed request differ after the prompt, so the others find the prompt in the prefix cache.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._answers = request.open_answers
        self._has_forked = len(self._answers) == 1

    @property
    def slots(self) -> int:
        """Most sequences that the request runs at a time."""
        return self._request.n

    @property
    def answers(self) -> tuple[int, ...]:
        """The indices of the answers that are generated."""
        return self._answers

    def start(self) -> tuple[NewSequence, ...]:
        """The sequence that computes the prompt."""
        first = self._answers[0]
        return (NewSequence(first, _sample(self._request, first), first, may_fork=not self._has_forked),)

    def advance(self, slot: int, commit: Commit) -> StrategyStep:
        """Pass the commit on. The first commit also starts the other sequences."""
        commits = (replace(commit, index=slot) if slot else commit,)
        if self._has_forked:
            return StrategyStep((), commits)
        self._has_forked = True
        parent = None if self._request.resumed else self._answers[0]
        forks = (NewSequence(index, _sample(self._request, index), index, parent) for index in self._answers[1:])
        return StrategyStep(tuple(forks), commits)


def _sample(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request for answer `index` alone."""
    if request.n == 1:
        return request
    sampling = replace(request.sampling, seed=request.seed_of(index))
    if index != request.open_answers[0]:
        sampling = replace(sampling, prompt_logprobs=None)  # the first sequence scores the prompt
    return replace(request, n=1, sampling=sampling, resumed=request.resumed[index : index + 1])
