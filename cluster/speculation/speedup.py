"""Measured speed-up: how fast rounds with and without drafts were, by how many rows decided in them.

The goodput model predicts; this module measures. Where rounds with drafts were slower than rounds without, speculation
is suspended regardless of the prediction, and tried again after a pause. The pause doubles each time, and it is so long
that the time lost by trying is a small share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.speculation.constants import (
    CLEAR_LOSS,
    CLEAR_ROUNDS,
    FEW_PLAIN_ROUNDS,
    FIRST_CONTROL_ROUNDS,
    FIRST_PAUSE,
    LOSS_SHARE,
    MAX_PAUSE,
    MAX_PLAIN_DELAY,
    MIN_PLAIN_ROUNDS,
    MIN_SPEEDUP,
    MIN_SPEEDUP_ALONE,
    ROUND_DECAY,
    SURE_ROUNDS,
)


@dataclass(slots=True)
class _RoundSums:
    """Sums over rounds of about the same number of rows. Older rounds count less."""

    plain_seconds: float = 0.0
    """Total time of rounds without drafts, in seconds."""
    plain_rounds: float = 0.0
    """Number of rounds without drafts."""
    is_plain_bounded: bool = False
    """Whether few rounds without drafts were measured, and one of them counted as shorter than it was."""
    seconds: float = 0.0
    """Total time of rounds with drafts, in seconds."""
    tokens: float = 0.0
    """Tokens that rounds with drafts committed."""
    rows: float = 0.0
    """Rows of rounds with drafts."""
    rounds: int = 0
    """Rounds with drafts since speculation was last suspended."""
    pause: int = 0
    """Rounds for which speculation stays suspended."""
    next_pause: int = FIRST_PAUSE
    """How many rounds the next suspension lasts."""
    plain_rounds_due: float = 0.0
    """Rounds without drafts after which the time lost by rounds with drafts is at most `LOSS_SHARE` of all time."""

    @property
    def speedup(self) -> float:
        """How many times faster rounds with drafts were than rounds without."""
        seconds_per_plain_round = self.plain_seconds / self.plain_rounds
        plain_seconds = seconds_per_plain_round * self.decayed_rounds
        return (self.tokens / self.rows) * plain_seconds / self.seconds

    @property
    def lost_rounds(self) -> float:
        """In how many rounds without drafts the time would have passed that rounds with drafts lost."""
        return self.seconds * self.plain_rounds / self.plain_seconds - self.tokens / self.rows * self.decayed_rounds

    @property
    def decayed_rounds(self) -> float:
        """Number of rounds with drafts as the decayed sums count them."""
        return (1 - ROUND_DECAY**self.rounds) / (1 - ROUND_DECAY)

    def add_loss(self, seconds: float, rounds: float) -> None:
        """Add `seconds` of work with drafts, for which plain decoding would have needed `rounds` rounds."""
        if self.plain_seconds > 0.0:
            lost = seconds * self.plain_rounds / self.plain_seconds - rounds
            self.plain_rounds_due = max(0.0, self.plain_rounds_due + lost / LOSS_SHARE)

    def clear_drafted(self) -> None:
        """Drop the rounds with drafts."""
        self.seconds = self.tokens = self.rows = 0.0
        self.rounds = 0


class SpeedupTracker:
    """Measures whether rounds with drafts are faster than rounds without, per batch size."""

    def __init__(self) -> None:
        self._sums: dict[int, _RoundSums] = {}
        self._period_rounds = 0
        """Rounds of the period at whose end rounds without drafts measure plain decoding."""
        self._several_period = FIRST_CONTROL_ROUNDS
        """Longest such period of several sequences."""

    def suspends(self, rows: int) -> bool:
        """Whether a round of `rows` rows must have no drafts. Call it once per round: it counts the pause down."""
        sums = self._of(rows)
        if sums.plain_rounds < MIN_PLAIN_ROUNDS:
            return True
        # A drafted token costs more with more rows: if it costs time for few rows, it costs time for more.
        paused = [other for bucket, other in self._sums.items() if bucket <= _bucket_of(rows) and other.pause]
        for other in paused:
            other.pause -= 1
        return bool(paused)

    def controls(self, rows: int, longest: int, count: int) -> bool:
        """Whether a round of `rows` rows that may have drafts goes without, to measure plain decoding.

        These are the last `count` rounds of each period of at most `longest` rounds. Call it once per round that may
        have drafts.
        """
        self._period_rounds += 1
        period = longest if rows == 1 else min(longest, self._several_period)
        if self._period_rounds <= period - count:
            return False
        if self._period_rounds >= period:
            self._period_rounds = 0
            if rows > 1:
                self._several_period = min(2 * self._several_period, longest)
        return True

    def pause(self, rows: int) -> int:
        """For how many rounds of `rows` rows speculation stays suspended."""
        return max((other.pause for bucket, other in self._sums.items() if bucket <= _bucket_of(rows)), default=0)

    def renew(self, rows: int) -> bool:
        """End a suspension for `rows` rows and drop earlier rounds with drafts, unless lost time is left to make up.

        Call it when other sequences begin, because drafts may save time for them. Returns whether it was done.
        """
        covered = [other for bucket, other in self._sums.items() if bucket <= _bucket_of(rows)]
        if any(other.plain_rounds_due > 0.0 for other in covered):
            return False
        for other in covered:
            if other.pause or not self.pays(rows):
                other.pause = 0
                other.clear_drafted()
        return True

    def observe_lost(self, rows: int, seconds: float) -> None:
        """Add time that drafts took outside of the rounds that are compared, in seconds."""
        self._of(rows).add_loss(seconds, 0.0)

    def pays(self, rows: int) -> bool:
        """Whether recent rounds with drafts were faster than rounds without."""
        sums = self._of(rows)
        is_known = sums.plain_rounds >= MIN_PLAIN_ROUNDS and sums.rounds >= CLEAR_ROUNDS
        return is_known and sums.speedup > 1.0

    def observe_plain(self, rows: int, seconds: float, expected_seconds: float = math.inf) -> None:
        """Add a round without drafts and without prompts, in seconds.

        `expected_seconds` is its duration as earlier rounds of all sizes predict it.
        """
        sums = self._of(rows)
        is_few, bound = sums.plain_rounds < FEW_PLAIN_ROUNDS, MAX_PLAIN_DELAY * expected_seconds
        sums.is_plain_bounded = is_few and (sums.is_plain_bounded or seconds > bound)
        if is_few:
            seconds = min(seconds, bound)
        sums.plain_seconds = sums.plain_seconds * ROUND_DECAY + seconds
        sums.plain_rounds = sums.plain_rounds * ROUND_DECAY + 1
        sums.plain_rounds_due = max(0.0, sums.plain_rounds_due - 1)

    def observe_drafted(self, rows: int, seconds: float, tokens: int) -> None:
        """Add a round with drafts and without prompts.

        `seconds` includes the wait for proposals; `tokens` is how many the round committed.
        """
        sums = self._of(rows)
        sums.seconds = sums.seconds * ROUND_DECAY + seconds
        sums.tokens = sums.tokens * ROUND_DECAY + tokens
        sums.rows = sums.rows * ROUND_DECAY + rows
        sums.rounds += 1
        if sums.plain_rounds < MIN_PLAIN_ROUNDS:
            return
        sums.add_loss(seconds, tokens / rows)
        speedup = sums.speedup
        least = MIN_SPEEDUP if rows > 1 else MIN_SPEEDUP_ALONE
        if (sums.rounds >= SURE_ROUNDS and speedup < least) or (sums.rounds >= CLEAR_ROUNDS and speedup < CLEAR_LOSS):
            if sums.is_plain_bounded:  # it may not be a loss: measure plain rounds first
                sums.pause, sums.plain_rounds_due = FIRST_PAUSE, 0.0
            else:
                due = sums.plain_rounds_due if rows > 1 else 0.0  # drafters' work on new prompts, too
                sums.pause = max(sums.next_pause, math.ceil(max(sums.lost_rounds / LOSS_SHARE, due)))
                sums.next_pause = min(2 * sums.next_pause, MAX_PAUSE)
            sums.clear_drafted()
        elif sums.rounds >= SURE_ROUNDS:
            sums.next_pause = FIRST_PAUSE

    def _of(self, rows: int) -> _RoundSums:
        return self._sums.setdefault(_bucket_of(rows), _RoundSums())


def _bucket_of(rows: int) -> int:
    """One bucket for each doubling: rows come and go while a gain is measured."""
    return max(0, rows - 1).bit_length()
