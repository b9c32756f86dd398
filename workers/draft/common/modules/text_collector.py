"""Collects the hidden states that the target shows of running sequences, to learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cluster.core.drafting import Evidence
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT
from workers.draft.common.learning import CollectedText, Reservoir, consecutive
from workers.draft.common.modules.tap_reader import TapReader

CONTEXT = 64
"""Positions before the last one of a prompt that texts begin with for a method that keeps keys and values."""
_MOST_COLLECTED = 1024
"""Most positions of one sequence whose hidden states are collected."""
_TEXTS = 96
"""Longest texts that the default memory holds: half of them finished, which are enough for a training."""
_LEAST_BYTES, _MOST_BYTES = 64 << 20, 2 << 30
"""Bounds of the default memory."""


class CollectedStates:
    """What is collected of one running sequence."""

    __slots__ = ("failures", "pieces", "positions", "reserved")

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Tensor]] = []
        """First position and rows [positions, width]."""
        self.positions = 0
        """Positions of all pieces."""
        self.failures: set[int] = set()
        """Positions of tokens in whose place the target rejected all that was drafted; fewer than `positions`."""
        self.reserved = 0
        """Bytes that the reservoir counts for what was collected."""

    def forget(self) -> None:
        """Drop what was collected, because a token has changed."""
        self.pieces.clear()
        self.failures.clear()
        self.positions = 0


class CollectedSession(Protocol):
    """A sequence that texts are collected of."""

    start: SequenceStart
    tokens: list[int]
    collected: CollectedStates


class TextCollector:
    """Collects texts if it was given a reservoir, and only of sequences that allow it."""

    def __init__(self, reader: TapReader, before: int = 0) -> None:
        """`before` is the number of positions before the last one of the prompt that are collected, too."""
        self.reader = reader
        self._kept = reader.of_all_taps()
        self._before = before
        self._reservoir: Reservoir | None = None

    @property
    def default_bytes(self) -> int:
        """Memory for texts where the settings do not say how much, in bytes."""
        return min(max(_LEAST_BYTES, _TEXTS * _MOST_COLLECTED * self._kept.position_bytes), _MOST_BYTES)

    def collect_into(self, reservoir: Reservoir) -> None:
        """Add the texts of finished sequences to `reservoir` from now on."""
        self._reservoir = reservoir

    def take(self, session: CollectedSession, evidence: Sequence[Evidence]) -> None:
        """Collect the hidden states of a sequence. Raises `ValueError` for ones of a wrong width."""
        reservoir, collected = self._reservoir, session.collected
        if reservoir is None or not session.start.allows_learning:
            return
        oldest = session.start.prompt_len - 1 - self._before
        for one in evidence:
            room = _MOST_COLLECTED - collected.positions
            found = self._kept.read(one, oldest, room) if room else None
            if found is None:
                continue
            if (failure := _failure(one, session.tokens)) is not None:
                collected.failures.add(failure)
            first, taps = found
            rows = taps.flatten(1)  # `read` has copied it
            size = rows.numel() * rows.element_size()
            if reservoir.reserve(size):
                collected.pieces.append((first, rows))
                collected.positions += len(rows)
                collected.reserved += size

    def finish(self, session: CollectedSession) -> None:
        """Give what was collected of a sequence that ends to the reservoir."""
        if self._reservoir is None or not session.collected.reserved:
            return
        found = consecutive(session.collected.pieces)
        if found is not None:
            first, rows = found
            # Nothing is learned of tokens beyond those that follow the last known states.
            tokens, failures = session.tokens[: first + len(rows) + 2], sorted(session.collected.failures)
            text = CollectedText(session.start, tuple(tokens), first, rows, tuple(failures))
            if text.base_len < len(text.tokens):
                self._reservoir.add(text)
        self._reservoir.free(session.collected.reserved)


def _failure(evidence: Evidence, tokens: Sequence[int]) -> int | None:
    """The position of the token in whose place a step rejected all that was drafted; `None` where it rejected nothing.

    `tokens` are those that are committed.
    """
    tree = evidence.tree
    accepted = tree.follow(tokens[evidence.base_len :])
    position = evidence.base_len + len(accepted)
    was_drafted = (accepted[-1] if accepted else ROOT) in tree.parents
    return position if was_drafted and position < len(tokens) else None
