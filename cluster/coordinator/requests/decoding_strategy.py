"""Decoding strategies: which sequences one request runs, and which commits its reader gets."""

from __future__ import annotations

from dataclasses import dataclass
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
        ...

    @property
    def answers(self) -> tuple[int, ...]:
        """The indices of the answers, at least one. The reader gets one commit with `finish` for each."""
        ...

    def start(self) -> tuple[NewSequence, ...]:
        """The first sequences."""
        ...

    def advance(self, slot: int, commit: Commit) -> StrategyStep:
        """Return the new sequences and the reader's commits after a commit of the sequence in `slot`.

        Raises `InvalidRequest` for a commit that the strategy cannot use.
        """
        ...
