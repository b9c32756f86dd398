"""Serves all generation calls of one ingress over one stream."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import grpc

from cluster.core.errors import InvalidRequest
from cluster.wire.interceptor import parsed, status_of
from cluster.wire.status import DETAIL_KEY
from pilotfish.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

WINDOW = 64
"""Responses of one call that the client has not consumed. The call waits at this number."""
_MOST_EVENTS = 512
"""Events in one message."""
_MOST_STARTED_BYTES = 16 * 1024 * 1024
"""Bytes of the starts in one message, unless one start alone has more. A start may have all of a prompt."""

Generate = Callable[[generation_pb2.GenerateRequest, float], AsyncGenerator[generation_pb2.GenerateResponse, None]]
"""Yields the responses of one request with a timeout in seconds. Raises Pilotfish errors."""


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


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """The internal service of a coordinator beside the public ones."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def Generate(
        self,
        request_iterator: AsyncIterator[coordinator_pb2.CoordinatorServiceGenerateRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[coordinator_pb2.CoordinatorServiceGenerateResponse]:
        """Run the calls of the stream. When the server stops, the last events of calls that have ended are sent."""
        calls = _Calls(self._generate)
        reading = asyncio.create_task(calls.read(request_iterator), name="calls")
        try:
            while events := await calls.outbox.take():
                for part in _parts(events):
                    yield coordinator_pb2.CoordinatorServiceGenerateResponse(events=part)
            await reading  # raises the error that has ended the stream
        finally:
            reading.cancel()
            await calls.cancel()


def _parts(events: Sequence[coordinator_pb2.CallEvent]) -> Iterator[list[coordinator_pb2.CallEvent]]:
    """Yield the events of each message. Those that are not the starts of calls are short."""
    part: list[coordinator_pb2.CallEvent] = []
    started_bytes = 0
    for event in events:
        size = event.ByteSize() if event.response.HasField("started") else 0
        if part and (len(part) >= _MOST_EVENTS or (size and started_bytes + size > _MOST_STARTED_BYTES)):
            yield part
            part, started_bytes = [], 0
        part.append(event)
        started_bytes += size
    yield part


class _Call:
    """A running call, and how many of its responses the client has not consumed."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._open = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def consume(self, count: int) -> None:
        self._open = max(0, self._open - count)
        if self._open < WINDOW:
            self._has_room.set()

    async def sent(self) -> None:
        """Count a response that was sent, and wait while too many are not consumed."""
        self._open += 1
        if self._open >= WINDOW:
            self._has_room.clear()
            await self._has_room.wait()


class _Calls:
    """The calls of one stream."""

    def __init__(self, generate: Generate) -> None:
        self.outbox: Outbox[coordinator_pb2.CallEvent] = Outbox()
        self._generate = generate
        self._running: dict[int, _Call] = {}

    async def read(self, requests: AsyncIterator[coordinator_pb2.CoordinatorServiceGenerateRequest]) -> None:
        """Begin and cancel calls until the requests end, then wait for the calls that run."""
        try:
            async for request in requests:
                self._apply(request)
            await asyncio.gather(*(call.task for call in self._running.values() if call.task), return_exceptions=True)
        finally:
            self.outbox.close()

    async def cancel(self) -> None:
        """Cancel all calls and wait for their ends."""
        tasks = [call.task for call in self._running.values() if call.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _apply(self, request: coordinator_pb2.CoordinatorServiceGenerateRequest) -> None:
        call = self._running.get(request.call)
        match request.WhichOneof("action"):
            case "begin":
                if call is not None or request.call < 1:
                    raise InvalidRequest("call", request.call, "a number that no running call has, at least 1")
                call = self._running[request.call] = _Call()
                call.task = asyncio.create_task(self._run(request.call, call, request.begin), name="call")
            case "cancel":
                if call is not None and call.task is not None:
                    call.task.cancel()
            case "consumed":
                if call is not None:
                    call.consume(request.consumed)
            case _:
                raise InvalidRequest("action", "nothing", "begin, cancel or consumed")

    async def _run(self, number: int, call: _Call, begin: coordinator_pb2.CallBegin) -> None:
        end = coordinator_pb2.CallEnd()
        try:
            if not begin.timeout_seconds > 0:  # NaN is refused, too
                raise InvalidRequest("timeout_seconds", begin.timeout_seconds, "above 0")
            request = parsed(generation_pb2.GenerateRequest, begin.request)
            async with aclosing(self._generate(request, begin.timeout_seconds)) as responses:
                async for response in responses:
                    self.outbox.put(coordinator_pb2.CallEvent(call=number, response=response))
                    await call.sent()
        except Exception as error:
            code, end.message, metadata = status_of(error)
            end.code = code.value[0]
            detail = dict(metadata).get(DETAIL_KEY)
            end.detail = detail if isinstance(detail, bytes) else b""
        finally:
            self._running.pop(number, None)
        self.outbox.put(coordinator_pb2.CallEvent(call=number, end=end))
