"""Lets the requests of a flood in a few at a time, so that health checks and running streams keep their time.

Under Ray Serve a request passes three event loops, in threads of two processes, before the HTTP API sees it. None of
them refuses anything. A thousand requests at once would queue there, and whatever comes next would wait for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.errors import Overloaded
from cluster.ingress.openai.errors import error_response

AT_ONCE = 8
"""Requests that are let in together."""
WINDOW_SECONDS = 0.25
"""No request waits while at most `AT_ONCE` requests arrive in this time, in seconds."""
LONGEST_PAUSE_SECONDS = 1.0
"""Longest time until the next requests are let in, in seconds, however late the marked request is answered."""
MOST_WAITING = 512
"""Most requests that wait. Further ones are refused before their bodies are read."""
_MARK = (b"x-pilotfish-mark", b"1")
_REFUSED = "pacing_refused"
"""Entry in the state of a mark's scope: number of requests refused since the last mark. Clients cannot set it."""


class PacingMiddleware:
    """An ASGI middleware around the proxy that lets `POST` requests in a few at a time, and the others at once.

    After every `AT_ONCE` requests it sends a marked request the same way, which `MarkMiddleware` answers in the
    application. When its answer comes back, the requests before it have left all queues on the way, and the next ones
    are let in. It also says how many requests were refused here, so that the application counts them; requests are
    refused only while others wait, so a marked request follows. A waiting request holds its connection and nothing
    else, for at most `MOST_WAITING / AT_ONCE * LONGEST_PAUSE_SECONDS`. Without a flood nothing waits and no marked
    request is sent.
    """

    def __init__(
        self, app: ASGIApp, most_waiting: int = MOST_WAITING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._most_waiting = most_waiting
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pacing: asyncio.Task[None] | None = None
        self._window = 0.0
        self._entered = 0
        self._refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app at once, when it is the request's turn, or not at all."""
        if scope["type"] != "http" or scope["method"] != "POST" or self._enters():
            await self._app(scope, receive, send)
        elif len(self._waiting) >= self._most_waiting:
            self._refused += 1
            error = error_response(Overloaded(f"{self._most_waiting} requests wait already to be read"))
            await error.response(scope)(scope, receive, send)
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            if self._pacing is None:
                # A copy: the proxy writes the application's prefix into the scopes of requests.
                self._pacing = asyncio.create_task(self._pace({**scope}), name="pacing")
            await turn
            await self._app(scope, receive, send)

    def _enters(self) -> bool:
        """Whether a request need not wait. Counts it."""
        now = self._clock()
        if self._pacing is None and now - self._window > WINDOW_SECONDS:
            self._window, self._entered = now, 0
        if self._pacing is not None or self._entered >= AT_ONCE:
            return False
        self._entered += 1
        return True

    async def _pace(self, scope: Scope) -> None:
        """Let the waiting requests in, a few after every mark. Ends when none waits."""
        try:
            while self._waiting:
                await self._pass_mark(scope)
                for _ in range(min(AT_ONCE, len(self._waiting))):
                    turn = self._waiting.popleft()
                    if not turn.done():  # a server that stops cancels its requests
                        turn.set_result(None)
        finally:
            self._pacing = None
            self._window, self._entered = self._clock(), AT_ONCE

    async def _pass_mark(self, scope: Scope) -> None:
        """Send a mark to the application of the request with this scope, and wait until it comes back."""
        state, self._refused = {_REFUSED: self._refused}, 0
        mark = {**scope, "method": "GET", "headers": [_MARK], "query_string": b"", "state": state}
        passing: asyncio.Future[None] = asyncio.ensure_future(self._app(mark, _Empty(), _ignore))
        passing.add_done_callback(_take_error)
        await asyncio.wait({passing}, timeout=LONGEST_PAUSE_SECONDS)


class MarkMiddleware:
    """An ASGI middleware of the application that answers the marks of `PacingMiddleware`, with status 204.

    It passes the name of the error and the number of requests that were refused with it to `refused`.
    """

    def __init__(self, app: ASGIApp, refused: Callable[[str, int], None]) -> None:
        self._app = app
        self._note_refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a mark, or run the app."""
        is_mark = scope["type"] == "http" and _MARK in scope["headers"]
        if is_mark and (count := scope.get("state", {}).get(_REFUSED, 0)):
            self._note_refused(Overloaded.__name__, count)
        await (Response(status_code=204) if is_mark else self._app)(scope, receive, send)


class _Empty:
    """The body of a mark."""

    def __init__(self) -> None:
        self._is_read = False

    async def __call__(self) -> Message:
        if self._is_read:
            await asyncio.Future[None]()  # the connection stays until the answer is complete
        self._is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}


async def _ignore(_: Message) -> None:
    pass


def _take_error(passing: asyncio.Future[None]) -> None:
    """A mark that fails has come back too. The requests then meet the same error, and report it."""
    if not passing.cancelled():
        passing.exception()
