"""What the HTTP door needs of ASGI itself: bounded bodies, clients that leave, names for requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Coroutine
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.errors import Aborted, InvalidRequest, TooLarge
from cluster.ingress.validate import is_request_id

_T = TypeVar("_T")
_DRAIN_FACTOR = 8
_DRAIN_SECONDS = 2.0


class NamedRequests:
    """Gives every request a name of its own, and tells the response what it is called: so, or as its client wished.

    The client's `x-request-id` is for logs and the response alone: nothing keeps clients from using one twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with `name` (unlike any other) and `called` (as the response tells it) in the state."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        name = secrets.token_hex(16)
        called = wanted if is_request_id(wanted) else name
        scope.setdefault("state", {}).update(name=name, called=called)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = called
            await send(message)

        await self._app(scope, receive, send_named)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes; a longer one is never held.

    Raises `TooLarge`, `InvalidRequest` when it is not declared as JSON, `Aborted` when the client leaves.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("body", kind, "sent with content-type application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        await _drain(request, limit)
        raise TooLarge("body", f"{declared} bytes", f"at most {limit} bytes")
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit:
                await _drain(request, limit)
                raise TooLarge("body", f"more than {limit} bytes", f"at most {limit} bytes")
            body += chunk
    except ClientDisconnect:
        raise Aborted("the client left") from None
    return bytes(body)


async def _drain(request: Request, limit: int) -> None:
    """Let a client that goes on sending finish for a while, so that it reads the refusal, not a reset."""
    if "expect" in request.headers:
        return
    left = limit * _DRAIN_FACTOR
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def timeout_of(request: Request, longest: float) -> float:
    """Seconds the client gives its request in `x-request-timeout`, at most `longest`. Raises `InvalidRequest`."""
    header = request.headers.get("x-request-timeout")
    if header is None:
        return longest
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("x-request-timeout", header, "a number of seconds above 0")
    return min(seconds, longest)


async def while_connected(request: Request, work: Coroutine[object, object, _T]) -> _T:
    """The result of `work`, which is cancelled when the client leaves; then raises `Aborted`."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Aborted("the client left")
        return task.result()
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events from a generator that is closed whatever happens to the connection."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
