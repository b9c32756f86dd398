"""Keeps the drafters of a coordinator equal to those in the directory's view."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.coordinator.coordinator import Coordinator
from cluster.core.membership import MemberRole, View
from cluster.wire.drafter_client import GrpcDrafter

logger = logging.getLogger(__name__)


class DrafterFollower:
    """Connects a coordinator with drafters that join, and disconnects it from those that leave.

    It uses drafters of its own `version` only: others draft for another model.
    """

    def __init__(self, coordinator: Coordinator, version: str, connect: Callable[[str], GrpcDrafter]) -> None:
        self._coordinator = coordinator
        self._version = version
        self._connect = connect
        self._drafters: dict[str, GrpcDrafter] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def follow(self, view: View) -> None:
        """Use the drafters in the view. Takes no time: those that leave are closed in the background."""
        present = {
            member.id: member.address
            for member in view.of(MemberRole.DRAFTER)
            if member.version == self._version and not member.is_draining
        }
        for name in self._drafters.keys() - present.keys():
            logger.info("drafter %s has left", name)
            leaving = asyncio.create_task(self._disconnect(name, self._drafters.pop(name)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for name in present.keys() - self._drafters.keys():
            logger.info("drafter %s has joined at %s", name, present[name])
            self._drafters[name] = self._connect(present[name])
            self._coordinator.add_drafter(name, self._drafters[name])

    async def close(self) -> None:
        """Disconnect all drafters."""
        self.follow(View())
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _disconnect(self, name: str, drafter: GrpcDrafter) -> None:
        try:
            await self._coordinator.remove_drafter(name)
        finally:
            await drafter.close()
