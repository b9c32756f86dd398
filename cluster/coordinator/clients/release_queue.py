"""Letting go of sequences on a worker: batched, in the background, until it has come through."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

from cluster.coordinator.clients.circuit_breaker import backoff
from cluster.core.errors import WorkerUnavailable
from cluster.core.ids import SequenceId

log = logging.getLogger(__name__)

LARGEST_BATCH = 4096
"""Ids in one Release, by its bound on the wire."""
MOST_OWED = 65_536
"""Ids remembered for a worker that is away; the oldest are forgotten first, for it will come back empty."""
TIMEOUT_SECONDS = 60.0
"""A release may have to wait for a step to end."""


class Releases:
    """What is owed to one worker. Its task lives only while something is owed."""

    def __init__(
        self,
        release: Callable[[Sequence[SequenceId]], Awaitable[None]],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._release = release
        self._on_done = on_done
        self._owed: dict[SequenceId, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Owe the worker these; returns at once. Never for a sequence that may still be sent to it."""
        self._owed.update(dict.fromkeys(sequence_ids))
        for forgotten in list(islice(self._owed, max(0, len(self._owed) - MOST_OWED))):
            del self._owed[forgotten]
        if self._owed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="releases")

    async def close(self, timeout_seconds: float) -> None:
        """Give what is owed a last chance of `timeout_seconds`, then drop it."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_seconds)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        attempt = 0
        while self._owed:
            batch = tuple(islice(self._owed, LARGEST_BATCH))
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await self._release(batch)
            except (WorkerUnavailable, TimeoutError) as error:
                log.debug("releasing %d sequences failed, to be repeated: %s", len(batch), error)
                await asyncio.sleep(backoff(attempt))
                attempt += 1
                continue
            except Exception:
                log.exception("releasing %d sequences failed for good", len(batch))
            attempt = 0
            for sequence_id in batch:
                self._owed.pop(sequence_id, None)
            self._on_done()
