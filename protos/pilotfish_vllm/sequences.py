"""Finds the sequence that a row of vLLM's batch belongs to.

vLLM tells a proposer the tokens of each row, but no request: rows move when others end, and a row may have another
request at the next step. A sequence is known again by its tokens. Two rows with the same tokens may be exchanged, for
their drafts are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
MOST_ABSENT_CALLS = 16
"""Calls without a sequence after which it counts as ended."""
IDLE_SECONDS = 10.0
"""Time without a call for a sequence after which it counts as ended, in seconds."""


class Sequence:
    """One sequence: its tokens at the last call, and how many of them the drafter holds."""

    __slots__ = ("absent_calls", "held", "id", "is_refused", "length", "seen_at", "tokens")

    def __init__(self, name: str) -> None:
        self.id = name
        self.tokens: Tokens = np.empty(0, np.int32)
        self.length = 0
        self.held = 0
        """Tokens that the drafter holds; 0: the next call sends the sequence from its start."""
        self.is_refused = False
        """Whether the drafter cannot draft for these tokens."""
        self.absent_calls = 0
        self.seen_at = 0.0

    def is_continued_by(self, row: npt.NDArray[Any]) -> bool:
        """Whether `row`, token ids `[length]`, begins with this sequence's tokens."""
        length = self.length
        return len(row) >= length and bool(np.array_equal(self.tokens[:length], row[:length]))

    def become(self, row: npt.NDArray[Any], now: float) -> None:
        """Take the tokens of a row that continues this sequence. `now` is in seconds."""
        if len(row) > len(self.tokens):
            larger = np.empty(2 * len(row), np.int32)
            larger[: self.length] = self.tokens[: self.length]
            self.tokens = larger
        self.tokens[self.length : len(row)] = row[self.length :]
        self.length = len(row)
        self.absent_calls, self.seen_at = 0, now


class Sequences:
    """The sequences that were seen lately. Used by one thread at a time."""

    def __init__(self) -> None:
        self._at: dict[int, Sequence] = {}
        """The sequences of the last call, by the index of their row."""
        self._absent: list[Sequence] = []
        self._named = 0

    def match(self, rows: Mapping[int, npt.NDArray[Any]], now: float) -> tuple[dict[int, Sequence], list[Sequence]]:
        """Find the sequence of each row, and those that have ended.

        `rows` has the token ids `[length]` of each row by its index. A row without a sequence begins one.
        """
        found: dict[int, Sequence] = {}
        for index, row in rows.items():
            before = self._at.get(index)
            if before is not None and before.is_continued_by(row):
                found[index] = before
        kept = set(map(id, found.values()))
        others = [one for one in (*self._at.values(), *self._absent) if id(one) not in kept]
        for index, row in rows.items():
            if index not in found:
                found[index] = self._take(others, row)
        for index, sequence in found.items():
            sequence.become(rows[index], now)
        for sequence in others:
            sequence.absent_calls += 1
        self._at = found
        self._absent = others
        return found, self._end(lambda one: one.absent_calls > MOST_ABSENT_CALLS)

    def end_idle(self, now: float) -> list[Sequence]:
        """Forget and return those that no call had for `IDLE_SECONDS` before `now`."""
        self._absent += self._at.values()
        self._at = {index: one for index, one in self._at.items() if now - one.seen_at <= IDLE_SECONDS}
        kept = set(map(id, self._at.values()))
        self._absent = [one for one in self._absent if id(one) not in kept]
        return self._end(lambda one: now - one.seen_at > IDLE_SECONDS)

    def _end(self, is_over: Any) -> list[Sequence]:
        ended = [one for one in self._absent if is_over(one)]
        self._absent = [one for one in self._absent if not is_over(one)]
        return ended

    def _take(self, others: list[Sequence], row: npt.NDArray[Any]) -> Sequence:
        """Remove and return the longest of the others that the row continues; else begin a sequence."""
        best = max((one for one in others if one.is_continued_by(row)), key=lambda one: one.length, default=None)
        if best is None:
            self._named += 1
            return Sequence(str(self._named))
        others.remove(best)
        return best
