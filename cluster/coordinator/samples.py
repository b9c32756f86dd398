"""How the answers to one request come about: which sequences are computed for it, and what its reader gets of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from cluster.core.request import Commit, GenerationRequest

_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Birth:
    """A sequence to compute."""

    place: int
    """Which of the request's places it takes; whoever had it before has ended."""
    request: GenerationRequest
    """Of this one sequence: its prompt, sampling and stopping."""
    answer: int | None
    """The index of the answer it writes, if it writes one."""
    parent: int | None = None
    """The place of a sequence that begins alike, before this turn: its stored KV is shared."""
    expects_heirs: bool = False
    """Whether sequences may be born later that share its KV."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a commit leads to."""

    births: tuple[Birth, ...] = ()
    commits: tuple[Commit, ...] = ()
    """For the reader; each answer's last one has `finish`."""


class Course(Protocol):
    """The plot of one request. Decides only: no clock, no worker."""

    @property
    def places(self) -> int:
        """Most sequences at a time: what the request weighs in the queue."""
        ...

    @property
    def answers(self) -> int:
        """How many commits with `finish` the reader gets."""
        ...

    def begin(self) -> tuple[Birth, ...]:
        """The first sequences."""
        ...

    def take(self, place: int, commit: Commit) -> Turn:
        """What follows from the commit of the sequence at `place`. Raises `InvalidRequest` for what makes no sense."""
        ...


class Samples:
    """`n` answers that share a prompt: the first computes it, the others join when it is stored.

    Answer `i` is drawn with the request's seed plus `i`, modulo 2**64: it is what a request of its own would get.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._are_born = request.n == 1

    @property
    def places(self) -> int:
        """See `Course`."""
        return self._request.n

    @property
    def answers(self) -> int:
        """See `Course`."""
        return self._request.n

    def begin(self) -> tuple[Birth, ...]:
        """See `Course`."""
        return (Birth(0, _sample(self._request, 0), 0, expects_heirs=not self._are_born),)

    def take(self, place: int, commit: Commit) -> Turn:
        """See `Course`."""
        commits = (replace(commit, index=place) if place else commit,)
        if self._are_born:
            return Turn((), commits)
        self._are_born = True
        births = (Birth(index, _sample(self._request, index), index, 0) for index in range(1, self._request.n))
        return Turn(tuple(births), commits)


def _sample(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request for one of the answers alone."""
    if request.n == 1:
        return request
    return replace(request, n=1, sampling=replace(request.sampling, seed=(request.sampling.seed + index) % _SEEDS))
