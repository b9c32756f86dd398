"""The Serve replica of a drafter: Ray places and restarts it, gRPC carries every token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from cluster.core.ports import DraftMethod
from workers.draft.registry import create
from workers.serve.configuration import load_configuration
from workers.serve.node import node_address, set_threads
from workers.serve.worker_server import WorkerHost, host_draft, set_log_level


class DraftReplica:
    """Hosts one drafting method behind `DraftService`, at an address of its own."""

    def __init__(
        self, section: Mapping[str, Any], target_section: Mapping[str, Any], threads: int, address: str | None
    ) -> None:
        self._configuration = load_configuration({"draft": section, "target": target_section})
        self._threads = threads
        self._address = address or node_address()
        self._host: WorkerHost | None = None

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start the drafter at the first call. Serve counts the replica as ready when this returns."""
        set_log_level(user_config)
        if self._host is None:
            host = host_draft(self._address, await asyncio.to_thread(self._load))
            await host.start()
            self._host = host

    async def address(self) -> str:
        """The address at which `DraftService` listens; empty until it does."""
        return self._host.address if self._host is not None else ""

    async def check_health(self) -> None:
        """Raise an error if this replica is unusable, so that Serve replaces it."""
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Stop the replica. Serve awaits this when it shuts the replica down."""
        if self._host is not None:
            await self._host.stop()

    def _load(self) -> DraftMethod:
        if self._configuration.draft.weights is not None:
            set_threads(self._threads)
        return create(self._configuration.draft, self._configuration.target)
