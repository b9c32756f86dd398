"""Notices that another process is gone or frozen: it is pinged, and an answer that does not come counts as its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PING_SECONDS = 5.0
"""Longest wait for the answer to one ping, in seconds."""
MOST_UNANSWERED = 4
"""Pings without an answer in a row after which a process counts as frozen.

Several, because the timer of a ping also expires when the process that sends it was itself stopped for a while.
"""
PERIOD_SECONDS = 1.0
"""Pause between an answer and the next ping, in seconds."""


async def until_lost(
    ping: Callable[[], Awaitable[object]], seconds: float = PING_SECONDS, period_seconds: float = PERIOD_SECONDS
) -> str:
    """Ping a process until a ping fails, or `MOST_UNANSWERED` in a row have no answer. Returns the reason.

    A slow process answers late, but one that answers at least one ping of `seconds` in time is not lost.
    """
    unanswered = 0
    while unanswered < MOST_UNANSWERED:
        try:
            async with asyncio.timeout(seconds):
                await ping()
        except TimeoutError:
            unanswered += 1
        except Exception as error:
            return str(error) or repr(error)
        else:
            unanswered = 0
            await asyncio.sleep(period_seconds)
    return f"it does not answer {MOST_UNANSWERED} pings of {seconds:g} s: it is frozen"
