"""An ingress' client of one coordinator: all generation calls share one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.errors import DeadlineExceeded, NotReady, PilotfishError, TooLarge
from cluster.wire.coordinator_service import WINDOW, Outbox
from cluster.wire.generation_client import GenerationClient
from cluster.wire.status import DETAIL_KEY, from_rpc_error
from pilotfish.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

MOST_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Longest request of a call. What surrounds it in its message is far shorter than the rest of that message's bound."""
_ACKNOWLEDGED = WINDOW // 2
"""Consumed responses after which the coordinator is told."""
_LATE_SECONDS = 2.0
"""How much later than the coordinator the client itself ends a call at its deadline, in seconds."""
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class CoordinatorClient(GenerationClient):
    """A client of a coordinator's internal services, for many calls at a time.

    When the stream breaks, every call on it raises `NotReady`, and the next call opens another stream.
    """

    _stream: _Stream | None = None

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        if self._stream is None or self._stream.is_lost:
            channel = await self._connection.channel()
            if self._stream is None or self._stream.is_lost:
                self._stream = _Stream(channel, self._connection)
        stream = self._stream
        call = stream.begin(request, timeout_seconds)
        try:
            while (response := await call.next()) is not None:
                yield response
        finally:
            stream.end(call)

    async def close(self) -> None:
        """Close the channel. Running calls raise `NotReady`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        await super().close()


class _Call:
    """The responses of one call that the reader has not taken yet."""

    def __init__(self, number: int, outbox: Outbox[coordinator_pb2.CoordinatorServiceGenerateRequest]) -> None:
        self.number = number
        self._outbox = outbox
        self._consumed = 0
        self.has_ended = False
        self.timer: asyncio.TimerHandle | None = None
        self._responses: deque[generation_pb2.GenerateResponse] = deque()
        self._error: PilotfishError | None = None
        self._arrived = asyncio.Event()

    def put(self, response: generation_pb2.GenerateResponse) -> None:
        self._responses.append(response)
        self._arrived.set()

    def finish(self, error: PilotfishError | None = None) -> None:
        """End the call after the responses that have arrived, with an error if there is one."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._arrived.set()

    async def next(self) -> generation_pb2.GenerateResponse | None:
        """The next response, or `None` after the last one. Raises the error that has ended the call."""
        while not self._responses:
            if self.has_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._arrived.clear()
            await self._arrived.wait()
        self._consumed += 1
        if self._consumed >= _ACKNOWLEDGED and not self.has_ended:
            message = coordinator_pb2.CoordinatorServiceGenerateRequest(call=self.number, consumed=self._consumed)
            self._outbox.put(message)
            self._consumed = 0
        return self._responses.popleft()


class _Stream:
    """One stream to the coordinator, and the calls on it."""

    def __init__(self, channel: grpc.aio.Channel, connection: Any) -> None:
        self.is_lost = False
        self._connection, self._channel = connection, channel
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._outbox: Outbox[coordinator_pb2.CoordinatorServiceGenerateRequest] = Outbox()
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self._stream = stub.Generate(self._requests(), metadata=connection.metadata)
        self._reading = asyncio.create_task(self._read(), name="calls")

    def begin(self, request: generation_pb2.GenerateRequest, timeout_seconds: float) -> _Call:
        """Begin a call. Raises `TooLarge` for a request that the stream cannot carry, which would break all calls."""
        data = request.SerializeToString()
        if len(data) > MOST_REQUEST_BYTES:
            raise TooLarge("body", f"{len(data)} bytes", f"at most {MOST_REQUEST_BYTES} bytes")
        self._last += 1
        call = self._calls[self._last] = _Call(self._last, self._outbox)
        begin = coordinator_pb2.CallBegin(request=data, timeout_seconds=timeout_seconds)
        self._outbox.put(coordinator_pb2.CoordinatorServiceGenerateRequest(call=call.number, begin=begin))
        late = DeadlineExceeded(f"no answer within {timeout_seconds:g} s")
        call.timer = asyncio.get_running_loop().call_later(timeout_seconds + _LATE_SECONDS, call.finish, late)
        return call

    def end(self, call: _Call) -> None:
        """Forget a call, and cancel it if it runs."""
        if call.timer is not None:
            call.timer.cancel()
        if self._calls.pop(call.number, None) is not None and not self.is_lost:
            cancel = coordinator_pb2.CallCancel()
            self._outbox.put(coordinator_pb2.CoordinatorServiceGenerateRequest(call=call.number, cancel=cancel))

    async def close(self) -> None:
        self._lose(NotReady("the connection was closed"))
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _requests(self) -> AsyncIterator[coordinator_pb2.CoordinatorServiceGenerateRequest]:
        while requests := await self._outbox.take():
            for request in requests:
                yield request

    async def _read(self) -> None:
        try:
            async for message in self._stream:
                for event in self._connection.checked(message).events:
                    self._apply(event)
            self._lose(NotReady("the coordinator is stopping"))
        except grpc.aio.AioRpcError as error:
            lost = self._connection.failed(error, self._channel)
            # Whatever broke the stream, it is no mistake of these calls, and they may go on elsewhere.
            self._lose(lost if isinstance(lost, NotReady) else NotReady(f"the stream of calls broke: {lost}"))
        except PilotfishError as error:
            self._lose(error)
        finally:
            if not self.is_lost:
                self._lose(NotReady("the connection was closed"))
            self._stream.cancel()
            self._stream = None  # errors hold this object for a while, and the call would hold its connection

    def _apply(self, event: coordinator_pb2.CallEvent) -> None:
        call = self._calls.get(event.call)
        if call is None:  # it was cancelled
            return
        if event.HasField("end"):
            del self._calls[event.call]
            call.finish(_error(event.end))
            return
        call.put(event.response)

    def _lose(self, error: PilotfishError) -> None:
        """Raise an error from all calls."""
        self.is_lost = True
        self._outbox.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(error)


def _error(end: coordinator_pb2.CallEnd) -> PilotfishError | None:
    """The error that ended a call, or `None`."""
    if end.code == grpc.StatusCode.OK.value[0]:
        return None
    code = _STATUS.get(end.code, grpc.StatusCode.UNKNOWN)
    trailing = grpc.aio.Metadata((DETAIL_KEY, end.detail)) if end.detail else grpc.aio.Metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, end.message), NotReady)
