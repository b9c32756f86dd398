"""Decides from measured times whether one more forward pass of the drafter is worth waiting for."""

from __future__ import annotations

_DECAY = 0.98
_LONGEST_SECONDS = 2.0
"""A longer time between two calls means that the sequence was not decoding; it is not counted."""
_LEAST_GAIN = 0.02
"""A pass that is expected to add fewer tokens than this is never made."""


class PassCost:
    """Estimates the tokens that a round loses while it waits for a pass. All times are in seconds.

    Every row of the round waits for a pass. So a pass must add more tokens than the target commits in its time.
    """

    def __init__(self) -> None:
        self.is_free = False
        """Whether no token is lost in the time of a pass: no target waits for it."""
        self._tokens = 0.0
        self._seconds = 0.0
        self._pass_seconds = 0.0
        self._passes = 0.0

    def record_commit(self, tokens: int, seconds: float) -> None:
        """Record that one sequence gained `tokens` between two calls that were `seconds` apart."""
        if seconds < _LONGEST_SECONDS and not self.is_free:
            self._tokens = self._tokens * _DECAY + tokens
            self._seconds = self._seconds * _DECAY + seconds

    def record_pass(self, seconds: float) -> None:
        """Record the time of one forward pass that expanded nodes."""
        self._pass_seconds = self._pass_seconds * _DECAY + seconds
        self._passes = self._passes * _DECAY + 1.0

    def is_worthwhile(self, gain: float, rows: int) -> bool:
        """Whether a pass that is expected to add `gain` tokens to a round of `rows` sequences is worth its time."""
        lost = 0.0
        if self._seconds > 0.0 and self._passes > 0.0:
            lost = rows * self._tokens / self._seconds * self._pass_seconds / self._passes
        return gain > max(lost, _LEAST_GAIN)


class CommitTimes:
    """When one sequence was drafted for, and how many tokens it had."""

    __slots__ = ("_at", "_length")

    def __init__(self) -> None:
        self._at = float("-inf")
        self._length = 0

    def record(self, length: int, now: float, cost: PassCost) -> None:
        """Record in `cost` what was committed since the last call. `now` is in seconds."""
        if length > self._length > 0:
            cost.record_commit(length - self._length, now - self._at)
        self._at, self._length = now, length
