"""Keeps the ranks of one target running: notices their end, and starts all of them anew.

The ranks of a tensor-parallel group fail together, since after a failure they may hold different states. The new group
has an empty KV pool and a new address. The coordinator finds it through `address()` and sends its sequences again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from cluster.core.errors import TargetUnavailable

logger = logging.getLogger(__name__)

MOST_FAILED_STARTS = 3
"""Starts in a row that may fail before the supervisor gives up, so that the replica is placed anew."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
"""Pauses after failed starts, in seconds. They double with each further one."""


class Ranks(Protocol):
    """The ranks of one target, which are started once."""

    async def start(self) -> str:
        """Start all ranks. Returns the address of `TargetService`. Raises the error of the rank that failed."""

    async def ended(self) -> str:
        """Return once the ranks can compute no more, with the reason."""

    async def stop(self) -> None:
        """Let the ranks finish the calls in flight and release what they hold, then end their processes."""

    def kill(self) -> None:
        """End the processes of all ranks at once. Killing again does nothing."""


class RankSupervisor:
    """Runs the ranks that `launch` makes, from `start()` to `stop()`."""

    def __init__(self, launch: Callable[[], Ranks]) -> None:
        self._launch = launch
        self._ranks: Ranks | None = None
        self._address = ""
        self._serving = asyncio.Event()
        self._failures: list[str] = []
        """Reasons of the last starts, all of which failed."""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once the ranks serve. Raises the error of the rank that failed: a first start is not repeated."""
        await self._begin()
        self._watching = asyncio.create_task(self._watch(), name="rank-supervisor")

    async def address(self) -> str:
        """The current address of `TargetService`. Waits while the ranks start. It is a `Resolve` of the wire."""
        await self._serving.wait()
        return self._address

    def check_health(self) -> None:
        """Raise `TargetUnavailable` once the ranks cannot be started again, so that the replica is replaced."""
        if len(self._failures) >= MOST_FAILED_STARTS:
            raise TargetUnavailable(f"the last {len(self._failures)} starts of the ranks failed: {self._failures[-1]}")
        if self._watching is not None and self._watching.done():
            raise TargetUnavailable("nobody supervises the ranks any more")

    async def stop(self) -> None:
        """Stop the ranks. Stopping again does nothing."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None
        self._serving.clear()
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            await ranks.stop()

    async def _begin(self) -> None:
        ranks = self._ranks = self._launch()
        try:
            self._address = await ranks.start()
        except BaseException:
            ranks.kill()
            raise
        self._serving.set()

    async def _watch(self) -> None:
        while self._ranks is not None:
            reason = await self._ranks.ended()
            lost_at = time.monotonic()
            logger.error("%s; all ranks start again", reason)
            self._serving.clear()
            self._ranks.kill()
            await self._begin_again()
            logger.warning("the ranks serve again after %.1f s", time.monotonic() - lost_at)

    async def _begin_again(self) -> None:
        """Start the ranks until it succeeds."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._begin()
            except Exception as error:
                logger.exception("the ranks could not be started")
                self._failures.append(str(error))
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause)
            else:
                self._failures.clear()
                return
