"""A drafter in this process that can be killed, to show that answers go on without it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from cluster.core.config.sections import Configuration
from cluster.core.errors import DrafterUnavailable
from cluster.wire.peer_access import PeerAccess
from workers.draft.registry import create, described
from workers.serve.worker_server import WorkerHost, host_draft

LOOPBACK = "127.0.0.1"
RESTART_SECONDS = 5.0
"""Time between the end of a killed drafter and the start of the next one, in seconds."""


class LocalDrafter:
    """An asynchronous context manager: inside, a drafter listens on a free port, unless it was killed just now."""

    def __init__(
        self, configuration: Configuration, access: PeerAccess, restart_seconds: float = RESTART_SECONDS
    ) -> None:
        self._configuration = configuration
        self._access = access
        self._restart_seconds = restart_seconds
        self._host: WorkerHost | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._restarting is not None and self._stopping is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, self._stopping, return_exceptions=True)
        if self._host is not None:
            await self._host.stop()

    async def resolve(self) -> str:
        """Return the address of the drafter. Raises `DrafterUnavailable` while there is none."""
        if self._host is None:
            raise DrafterUnavailable("the drafter was killed and has not started again yet")
        return self._host.address

    async def kill(self) -> bool:
        """Stop the drafter and lose what it holds; another one starts later. Returns whether it was running."""
        host, self._host = self._host, None
        if host is None:
            return False
        self._stopping = asyncio.create_task(host.stop(), name="stop-drafter")
        self._restarting = asyncio.create_task(self._restart(self._stopping), name="restart-drafter")
        return True

    async def _start(self) -> None:
        configuration = self._configuration
        method = await asyncio.to_thread(create, configuration.draft, configuration.target)
        lease_seconds = configuration.cluster.lease_seconds
        host = host_draft(
            LOOPBACK, method, self._access, lease_seconds=lease_seconds, described=described(configuration.draft)
        )
        await host.__aenter__()
        self._host = host

    async def _restart(self, stopping: asyncio.Task[None]) -> None:
        await asyncio.shield(stopping)
        await asyncio.sleep(self._restart_seconds)
        await self._start()
