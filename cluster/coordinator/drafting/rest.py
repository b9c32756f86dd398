"""Rest: rounds of plain decoding in which nothing about drafts is decided, while drafts do not pay.

What the controller learns from a round and decides before the next takes the coordinator a few hundred microseconds,
for which the target waits, or which it shares cores with. A rest is learned from once, when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.ids import SequenceId
from cluster.core.verification import VerifyRow


@dataclass(frozen=True, slots=True)
class RestedRounds:
    """The rounds of a rest that has ended."""

    rows: int
    """Rows of each round."""
    rounds: int
    """Number of rounds."""
    timed: int
    """Rounds in which each row had one token and no other row was beside them."""
    seconds: float
    """Time of those, in seconds."""


class Rest:
    """Counts the rounds of a rest. It ends after as many as it was given, or when other sequences run or wait."""

    def __init__(self) -> None:
        self._present: Sequence[SequenceId] = ()
        self._rows = self._rounds = self._left = self._timed = 0
        self._seconds = 0.0
        self.is_on = False
        """Whether the round under way belongs to a rest."""

    def begin(self, present: Sequence[SequenceId], rows: int, rounds: int) -> None:
        """Rest for up to `rounds` rounds of `rows` rows from the next one on; `present` run or wait now."""
        self._present, self._rows, self._left = present, rows, rounds

    def goes_on(self, present: Sequence[SequenceId]) -> bool:
        """Whether the round that begins belongs to the rest. Call it once per round."""
        self.is_on = self._left > 0 and present == self._present
        self._left = self._left - 1 if self.is_on else 0
        self._rounds += self.is_on
        return self.is_on

    def add(self, rows: Sequence[VerifyRow], seconds: float) -> None:
        """Add a round that took `seconds` seconds. A round unlike the others is not timed, and ends the rest."""
        if len(rows) == self._rows and sum([row.width for row in rows]) == self._rows:
            self._timed += 1
            self._seconds += seconds
        else:
            self._left = 0

    def take(self) -> RestedRounds | None:
        """The rounds since the last call, if there are any."""
        if not self._rounds:
            return None
        rested = RestedRounds(self._rows, self._rounds, self._timed, self._seconds)
        self._rounds = self._timed = 0
        self._seconds = 0.0
        return rested
