"""Lets requests in one after another while the event loop keeps up, so that a flood does not stop everything else."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

LONGEST_TURN_SECONDS = 0.005
"""A request is let in when the event loop has run all that was ready within this time, in seconds."""


class PacingMiddleware:
    """An ASGI middleware that starts at most one request with a body in each turn of the event loop.

    A thousand requests that arrive together would otherwise be parsed, validated and sent on side by side: every turn
    of the loop would take seconds, for health checks and running streams too. A waiting request holds its connection
    and nothing else. Requests without a body, as `GET /health`, never wait.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app = app
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._letting_in: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, once it is the request's turn."""
        if scope["type"] == "http" and scope["method"] == "POST":
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            if self._letting_in is None:
                self._letting_in = asyncio.create_task(self._let_in())
            await turn
        await self._app(scope, receive, send)

    async def _let_in(self) -> None:
        """Let the waiting requests in, one per turn, and none after a turn that took long."""
        try:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.done():  # its server has stopped
                    continue
                turn.set_result(None)
                while True:
                    begun = self._clock()
                    await asyncio.sleep(0)
                    if self._clock() - begun <= LONGEST_TURN_SECONDS:
                        break
        finally:
            self._letting_in = None
