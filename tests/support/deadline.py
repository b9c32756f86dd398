"""A time limit that shows where every task waits when it is exceeded."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`. When it expires, the awaits of all tasks go to stderr first.

    Raises `TimeoutError`.
    """
    shown = asyncio.get_running_loop().call_later(seconds, _show_tasks)
    try:
        async with asyncio.timeout(seconds + 0.1):
            yield
    finally:
        shown.cancel()


def _show_tasks() -> None:
    for task in asyncio.all_tasks():
        lines = [f"task {task.get_name()}:"]
        awaited: object = task.get_coro()
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
            if frame is not None:
                lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
        sys.stderr.write("\n".join(lines) + "\n")
