"""ASGI helpers of the HTTP API: request ids, bounded bodies, timeouts, clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.errors import Aborted, InvalidRequest, TooLarge
from cluster.core.ids import is_request_id
from cluster.ingress.openai.errors import error_response

_T = TypeVar("_T")
_REQUEST_ID = "x-request-id"
_DRAIN_FACTOR = 8
_DRAIN_SECONDS = 2.0


class RequestIdMiddleware:
    """Gives every request a unique id, and returns the client's own `x-request-id`, or else the unique id.

    The client's id is only for logs and the response header, because clients may use one twice. An id with
    characters outside ASCII is refused with status 400; another invalid id is replaced by the unique one.
    """

    def __init__(self, app: ASGIApp, *, adds_header: bool = True) -> None:
        """`adds_header=False` is for an app behind a proxy that adds `x-request-id` to responses itself."""
        self._app = app
        self._adds_header = adds_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app with `request_id` (unique) and `client_request_id` in the state of the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        header = headers.get(_REQUEST_ID, "")
        unique = secrets.token_hex(16)
        client_id = header if is_request_id(header) else unique
        headers[_REQUEST_ID] = client_id  # a proxy between this middleware and the app then uses the same id
        scope.setdefault("state", {}).update(request_id=unique, client_request_id=client_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._adds_header:
                MutableHeaders(scope=message)[_REQUEST_ID] = client_id
            await send(message)

        app = self._app if header.isascii() else _refusal(header, scope)
        await app(scope, receive, send_with_id)


def _refusal(header: str, scope: Scope) -> ASGIApp:
    return error_response(InvalidRequest(_REQUEST_ID, header, "1 to 64 letters, digits or ._:-")).response(scope)


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body of at most `limit` bytes. A longer body is never held in memory.

    Raises `TooLarge`, `InvalidRequest` for another content type than JSON, `Aborted` if the client disconnects. A
    client that is no browser, which would name an origin, may leave the content type out.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_unnamed = "content-type" not in request.headers and "origin" not in request.headers
    if kind != "application/json" and not is_unnamed:  # a browser sends JSON for other origins only if CORS allows it
        raise InvalidRequest("body", kind, "sent with content-type application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest("content-encoding", encoding, "left out: bodies are read as they are, not compressed")
    declared = request.headers.get("content-length", "").lstrip("0")
    if declared.isdecimal() and (len(declared) > len(str(limit)) or int(declared) > limit):
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
        raise Aborted("the client disconnected") from None
    return bytes(body)


async def _drain(request: Request, limit: int) -> None:
    """Read the remaining body for a limited time. Without this, a client that is still sending gets a reset."""
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
    """Return the timeout in the header `x-request-timeout`, in seconds, at most `longest`. Raises `InvalidRequest`."""
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
    """Return the result of `work`. If the client disconnects, cancel `work` and raise `Aborted`."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Aborted("the client disconnected")
        return task.result()
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RequestCount:
    """How many requests are answered at the moment."""

    def __init__(self) -> None:
        self.running = 0


class CountMiddleware:
    """Counts the requests for answers of the model, until their last byte is sent."""

    def __init__(self, app: ASGIApp, count: RequestCount) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, and count the request while it runs."""
        counts = scope["type"] == "http" and scope["method"] == "POST" and "/v1/" in scope["path"]
        self._count.running += counts
        try:
            await self._app(scope, receive, send)
        finally:
            self._count.running -= counts


class EventStream(StreamingResponse):
    """Server-sent events, and a comment whenever none came for a while, so that proxies keep the connection open.

    The generator is closed and `end` called however the response ends. No empty line follows a comment: after an event
    with an id, the client of `openai` would take it for an empty event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        silent_seconds: float,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        """`silent_seconds` is the longest time for which nothing is sent, in seconds.

        `end` frees what the events are made of: the generator does not if the client leaves before its first step.
        """
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._events = events
        self._silent_seconds = silent_seconds
        self._end = end
        self._is_sending = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                await self._end()

    async def stream_response(self, send: Send) -> None:
        """Send the whole response. Raises the error that has ended the events."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # One task reads and sends all events, because a task for each takes more time than the event.
        sending = asyncio.create_task(self._send_events(send), name="events")
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        try:
            while not sending.done():
                left = self._sent_at + self._silent_seconds - loop.time()
                if left > 0 or self._is_sending:
                    await asyncio.wait({sending}, timeout=left if left > 0 else self._silent_seconds)
                    continue
                await send({"type": "http.response.body", "body": b": keep-alive\n", "more_body": True})
                self._sent_at = loop.time()
            sending.result()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        async for event in self._events:
            self._is_sending = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._is_sending = False
            self._sent_at = loop.time()
