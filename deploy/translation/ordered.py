"""Work on many items at once, with the results in the order of the items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_WAITING_PER_SLOT = 4
"""Results that may wait for an earlier one, per item that is worked on at once."""


async def in_order(
    items: Sequence[Item], work: Callable[[Item], Awaitable[Result]], in_flight: int
) -> AsyncGenerator[Result, None]:
    """Yield `work(item)` for every item, in order. At most `in_flight` items are worked on at once.

    The first exception, in the order of the items, ends everything that still runs.
    """
    slots = asyncio.Semaphore(in_flight)
    tasks: deque[asyncio.Task[Result]] = deque()

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    try:
        for item in items:
            tasks.append(asyncio.create_task(one(item)))
            if len(tasks) > _WAITING_PER_SLOT * in_flight:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
