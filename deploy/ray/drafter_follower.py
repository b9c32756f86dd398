"""Keeps the drafters of a coordinator equal to those in the directory's view."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from cluster.core.membership import MemberRole, View
from cluster.core.ports import Drafter

logger = logging.getLogger(__name__)


class ClosableDrafter(Drafter, Protocol):
    """A drafter with a connection to close."""

    async def close(self) -> None:
        """Close the connection."""


class DrafterUser(Protocol):
    """A coordinator, as the follower uses it."""

    def add_drafter(self, name: str, drafter: Drafter) -> None:
        """Use one more drafter."""

    async def remove_drafter(self, name: str) -> None:
        """Use a drafter no more."""


class DrafterFollower:
    """Connects a coordinator with drafters that join, and disconnects it from those that leave.

    It uses drafters of its own `version` only: others draft for another model.
    """

    def __init__(self, user: DrafterUser, version: str, connect: Callable[[str], ClosableDrafter]) -> None:
        self._user = user
        self._version = version
        self._connect = connect
        self._drafters: dict[str, ClosableDrafter] = {}
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
            self._user.add_drafter(name, self._drafters[name])

    async def close(self) -> None:
        """Disconnect all drafters."""
        self.follow(View())
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _disconnect(self, name: str, drafter: ClosableDrafter) -> None:
        try:
            await self._user.remove_drafter(name)
        finally:
            await drafter.close()
