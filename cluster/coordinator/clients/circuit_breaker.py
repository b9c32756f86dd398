"""Back-off and circuit breaker: when to repeat calls that have failed."""

from __future__ import annotations

from collections.abc import Callable


def backoff(attempt: int, first: float = 0.05, longest: float = 5.0) -> float:
    """Seconds to wait before attempt `attempt` (0, 1, …) is repeated: doubling, up to `longest`."""
    return float(min(longest, first * 2.0 ** min(attempt, 32)))


class CircuitBreaker:
    """Decides whether rounds wait for a worker, so that a failing worker does not cost each round its timeout.

    While the breaker is closed, rounds wait for calls. One failure opens it. While it is open, background trial calls
    are `due` after delays that double. One success closes it.
    """

    def __init__(self, clock: Callable[[], float], first: float = 0.1, longest: float = 10.0) -> None:
        self._clock = clock
        self._first = first
        self._longest = longest
        self._failures = 0
        self._retry_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether rounds wait for calls to the worker."""
        return self._failures == 0

    def due(self) -> bool:
        """Whether an open breaker allows a trial call now. If it does, the next one is due after twice the delay."""
        if self.closed or self._clock() < self._retry_at:
            return False
        self._delay()
        return True

    def record_failure(self) -> None:
        """Record a call that failed, or that was late while a round waited for it."""
        if self.closed:
            self._delay()

    def record_success(self) -> None:
        """Record a call that was answered in time."""
        self._failures = 0

    def _delay(self) -> None:
        self._retry_at = self._clock() + backoff(self._failures, self._first, self._longest)
        self._failures += 1
