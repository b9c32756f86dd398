"""When to try again what has just failed."""

from __future__ import annotations

from collections.abc import Callable


def backoff(attempt: int, first: float = 0.05, longest: float = 5.0) -> float:
    """Seconds to wait before attempt `attempt` (0, 1, …) is repeated: doubling, bounded."""
    return float(min(longest, first * 2.0 ** min(attempt, 32)))


class Breaker:
    """Keeps a failing worker from costing each round its timeout.

    Closed, calls go out and are waited for. One failure opens it; then it is `due` from time to time, each
    time twice as late, for a try that nobody waits for. One success closes it.
    """

    def __init__(self, clock: Callable[[], float], first: float = 0.1, longest: float = 10.0) -> None:
        self._clock = clock
        self._first = first
        self._longest = longest
        self._failures = 0
        self._retry_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether calls are worth waiting for."""
        return self._failures == 0

    def due(self) -> bool:
        """Whether, while open, it is time for another try; the one after it is put off twice as long."""
        if self.closed or self._clock() < self._retry_at:
            return False
        self._put_off()
        return True

    def failed(self) -> None:
        """A call that was waited for came to nothing."""
        if self.closed:
            self._put_off()

    def succeeded(self) -> None:
        """A call came back in time."""
        self._failures = 0

    def _put_off(self) -> None:
        self._retry_at = self._clock() + backoff(self._failures, self._first, self._longest)
        self._failures += 1
