"""How the loop waits: for news, and a little longer after each round that came to nothing."""

from __future__ import annotations

import asyncio

from cluster.coordinator.clients.circuit_breaker import backoff


class Rest:
    """Wakes the loop early when something changes."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._fruitless = 0

    def wake(self) -> None:
        """Something changed."""
        self._news.set()

    def worked(self) -> None:
        """A round came to something."""
        self._fruitless = 0

    async def pause(self) -> None:
        """It came to nothing this time: do not spin."""
        seconds = backoff(self._fruitless, first=0.005, longest=1.0)
        self._fruitless += 1
        await self.until_news(seconds)

    async def until_news(self, seconds: float) -> bool:
        """Sleep until something changes, for `seconds` at most; whether it did."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True
