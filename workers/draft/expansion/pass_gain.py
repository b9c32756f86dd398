"""Whether one more forward pass is worth waiting for: measured, not assumed."""

from __future__ import annotations

_FADING = 0.98
_LONGEST_SECONDS = 2.0
"""A sequence that was not asked for during so long was not decoding."""
_LEAST_GAIN = 0.02


class Pace:
    """How fast sequences grow, and how long a pass takes; times in seconds.

    Tokens that a pass is expected to gain must come faster than those that the target commits anyway: each row of the
    round waits for the pass.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._pass_seconds = 0.0
        self._passes = 0.0

    def note_commit(self, tokens: int, seconds: float) -> None:
        """So many tokens were committed to one sequence between two calls."""
        if seconds < _LONGEST_SECONDS:
            self._tokens = self._tokens * _FADING + tokens
            self._seconds = self._seconds * _FADING + seconds

    def note_pass(self, seconds: float) -> None:
        """One forward pass that grew trees."""
        self._pass_seconds = self._pass_seconds * _FADING + seconds
        self._passes = self._passes * _FADING + 1.0

    def is_worth(self, gain: float, rows: int) -> bool:
        """Whether a pass is to be made that is expected to add `gain` tokens to a round of `rows` sequences."""
        price = 0.0
        if self._seconds > 0.0 and self._passes > 0.0:
            price = rows * self._tokens / self._seconds * self._pass_seconds / self._passes
        return gain > max(price, _LEAST_GAIN)
