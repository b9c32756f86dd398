"""A queue that several tasks fill and one task empties at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Items in the order in which they were put. Used on one event loop."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    def put(self, item: Item) -> None:
        """Add an item."""
        self._items.append(item)
        self._filled.set()

    def close(self) -> None:
        """End `take` once it has returned all items."""
        self._is_closed = True
        self._filled.set()

    async def take(self) -> list[Item]:
        """Wait for items and return all of them; none after `close`."""
        await self._filled.wait()
        items, self._items = self._items, []
        if not self._is_closed:
            self._filled.clear()
        return items
