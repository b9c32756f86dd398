"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Yield `(stream index, item)` in order of arrival. The first error ends all streams; so does closing this one."""
    if len(streams) == 1:  # nothing to wait for beside it
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await arrived.put((index, item))
        except Exception as error:  # the consumer raises it
            await arrived.put(error)
        else:
            await arrived.put(None)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            entry = await arrived.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
