"""One request while it lives: its sequence, and the way of its commits to whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from cluster.core.errors import PilotfishError
from cluster.core.sequence import Sequence
from cluster.core.types import Commit


class Stream:
    """Commits in, commits out. Its queue is bounded by nature: an answer has `max_tokens` at most."""

    __slots__ = ("_queue", "arrived_at", "expiry", "latest_at", "losses", "sequence", "touched")

    def __init__(self, sequence: Sequence, arrived_at: float) -> None:
        self.sequence = sequence
        self.arrived_at = arrived_at
        """On the coordinator's clock, as is `latest_at`."""
        self.latest_at: float | None = None
        """When tokens were last committed."""
        self.touched = False
        """Whether the target may hold something of it."""
        self.losses = 0
        """Steps in a row that were lost with this sequence in them."""
        self.expiry: asyncio.TimerHandle | None = None
        """Rings at the deadline."""
        self._queue: asyncio.Queue[Commit | PilotfishError] = asyncio.Queue()

    def emit(self, commit: Commit) -> None:
        """Hand one commit to the reader; one with `finish` is the last."""
        self._queue.put_nowait(commit)

    def fail(self, error: PilotfishError) -> None:
        """End the stream with an error, after what was emitted before."""
        self._queue.put_nowait(error)

    async def read(self) -> AsyncGenerator[Commit, None]:
        """The commits, in order, up to the last; raises what `fail` was given."""
        while True:
            item = await self._queue.get()
            if isinstance(item, PilotfishError):
                raise item
            yield item
            if item.finish is not None:
                return
