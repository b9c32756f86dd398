"""Waits of the loop: for a change, for a doubling pause after each round without progress; how long the loop waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.coordinator.clients.circuit_breaker import backoff

_FIRST_SECONDS = 0.005
"""Pause after the first round without progress, in seconds; it doubles with each further one."""
_LONGEST_SECONDS = 1.0
"""Longest pause, in seconds."""


class Wakeup:
    """Lets the loop sleep until something changes."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._idle_rounds = 0

    def notify(self) -> None:
        """Wake the loop, because something changed."""
        self._changed.set()

    def made_progress(self) -> None:
        """Reset the pause after a round that made progress."""
        self._idle_rounds = 0

    async def back_off(self) -> None:
        """Pause after a round without progress, so that the loop does not spin. A change ends the pause."""
        await self.wait(self._next_pause())

    async def pause(self) -> None:
        """Pause as `back_off` does, whatever changes: nothing that happens here brings back a target."""
        await asyncio.sleep(self._next_pause())

    def _next_pause(self) -> float:
        self._idle_rounds += 1
        return backoff(self._idle_rounds - 1, first=_FIRST_SECONDS, longest=_LONGEST_SECONDS)

    async def wait(self, seconds: float) -> bool:
        """Sleep until something changes, for at most `seconds`. Returns whether something changed."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


class LoopProgress:
    """Records when the loop, or a call that it waits for, last began something.

    Every wait of the loop has a bound, so a loop that begins nothing for longer hangs. A target that is away for long
    is no hang: the loop goes on calling it.
    """

    def __init__(self, clock: Callable[[], float], bound_seconds: float) -> None:
        self._clock = clock
        self._bound_seconds = bound_seconds
        self._latest_at = clock()

    def mark(self) -> None:
        """Record that something begins now."""
        self._latest_at = self._clock()

    @property
    def hung_seconds(self) -> float:
        """Time since the last beginning if that is longer than the bound, in seconds; otherwise 0."""
        seconds = self._clock() - self._latest_at
        return seconds if seconds > self._bound_seconds else 0.0
