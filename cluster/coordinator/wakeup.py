"""Waits of the loop: for a change, and for a doubling pause after each round without progress."""

from __future__ import annotations

import asyncio

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
        """Pause after a round without progress, so that the loop does not spin."""
        seconds = backoff(self._idle_rounds, first=_FIRST_SECONDS, longest=_LONGEST_SECONDS)
        self._idle_rounds += 1
        await self.wait(seconds)

    async def wait(self, seconds: float) -> bool:
        """Sleep until something changes, for at most `seconds`. Returns whether something changed."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True
