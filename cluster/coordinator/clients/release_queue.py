"""The release queue: frees sequences on a worker in the background, in batches, until the worker has answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

from cluster.coordinator.clients.circuit_breaker import backoff
from cluster.core.errors import WorkerUnavailable
from cluster.core.ids import SequenceId

log = logging.getLogger(__name__)

MAX_BATCH = 4096
"""Most ids in one Release, the bound of the message."""
MAX_QUEUED = 65_536
"""Most ids that are queued for an unreachable worker. The oldest are dropped first: the worker will restart empty."""
TIMEOUT_SECONDS = 60.0
"""Timeout of one Release in seconds. The call may have to wait for a step to end."""


class ReleaseQueue:
    """The sequences that one worker must still release. A task sends them; it runs only while there are any."""

    def __init__(
        self,
        release: Callable[[Sequence[SequenceId]], Awaitable[None]],
        on_released: Callable[[], None] = lambda: None,
    ) -> None:
        self._release = release
        self._on_released = on_released
        self._queued: dict[SequenceId, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Queue sequences and return at once. They must never be sent to the worker again."""
        self._queued.update(dict.fromkeys(sequence_ids))
        for dropped in list(islice(self._queued, max(0, len(self._queued) - MAX_QUEUED))):
            del self._queued[dropped]
        if self._queued and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="releases")

    async def close(self, timeout_seconds: float) -> None:
        """Send the queued ids within `timeout_seconds`, then drop those that are left."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_seconds)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        attempt = 0
        while self._queued:
            batch = tuple(islice(self._queued, MAX_BATCH))
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await self._release(batch)
            except (WorkerUnavailable, TimeoutError) as error:
                log.debug("releasing %d sequences failed and will be repeated: %s", len(batch), error)
                await asyncio.sleep(backoff(attempt))
                attempt += 1
                continue
            except Exception:
                log.exception("releasing %d sequences failed and will not be repeated", len(batch))
            attempt = 0
            for sequence_id in batch:
                self._queued.pop(sequence_id, None)
            self._on_released()
