"""Decoding strategies: which sequences one request runs, and which commits its reader gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from cluster.core.request import Commit, GenerationRequest


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to compute."""

    slot: int
    """The slot of the request that the sequence takes. The previous sequence in the slot has finished."""
    request: GenerationRequest
    """The prompt, sampling and stopping of this one sequence."""
    answer: int | None
    """The index of the answer that it writes; `None` for a beam, which may or may not become an answer."""
    parent: int | None = None
    """The slot of a sequence with the same first tokens, whose stored KV is shared."""
    may_fork: bool = False
    """Whether later sequences may share its KV."""


@dataclass(frozen=True, slots=True)
class StrategyStep:
    """The new sequences and the reader's commits that follow from one commit of a sequence."""

    sequences: tuple[NewSequence, ...] = ()
    """Sequences that start now."""
    commits: tuple[Commit, ...] = ()
    """Commits for the reader; the last one of each answer has `finish`."""


class DecodingStrategy(Protocol):
    """Decides which sequences a request runs. It has no clock and calls no worker."""

    @property
    def slots(self) -> int:
        """Most sequences that the request runs at a time."""

    @property
    def answers(self) -> tuple[int, ...]:
        """The indices of the answers, at least one. The reader gets one commit with `finish` for each."""

    def start(self) -> tuple[NewSequence, ...]:
        """The first sequences."""

    def advance(self, slot: int, commit: Commit) -> StrategyStep:
        """Return the new sequences and the reader's commits after a commit of the sequence in `slot`.

        Raises `InvalidRequest` for a commit that the strategy cannot use.
        """


class ParallelSampling:
    """`n` answers that share a prompt. The first sequence computes the prompt; the others fork once it is stored.

    Answer `i` is sampled with the request's seed plus `i`, modulo 2**64, so it equals the answer of a separate request.
    The answers of a resumed request differ after the prompt, so the others find the prompt in the prefix cache.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self.answers = request.open_answers
        """The indices of the answers that are generated."""
        self._has_forked = len(self.answers) == 1

    @property
    def slots(self) -> int:
        """Most sequences that the request runs at a time."""
        return self._request.n

    def start(self) -> tuple[NewSequence, ...]:
        """The sequence that computes the prompt."""
        first = self.answers[0]
        return (NewSequence(first, _sample(self._request, first), first, may_fork=not self._has_forked),)

    def advance(self, slot: int, commit: Commit) -> StrategyStep:
        """Pass the commit on. The first commit also starts the other sequences."""
        commits = (replace(commit, index=slot) if slot else commit,)
        if self._has_forked:
            return StrategyStep((), commits)
        self._has_forked = True
        parent = None if self._request.resumed else self.answers[0]
        forks = (NewSequence(index, _sample(self._request, index), index, parent) for index in self.answers[1:])
        return StrategyStep(tuple(forks), commits)


def _sample(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request for answer `index` alone."""
    if request.n == 1:
        return request
    sampling = replace(request.sampling, seed=request.seed_of(index))
    if index != request.open_answers[0]:
        sampling = replace(sampling, prompt_logprobs=None)  # the first sequence scores the prompt
    return replace(request, n=1, sampling=sampling, resumed=request.resumed[index : index + 1])
