"""A simulated network: unary calls and streams between simulated processes, as bytes, with faults.

It behaves as gRPC does over TCP. Messages of one connection keep their order unless a fault reorders calls that are
under way at the same time. A killed server resets its calls; a frozen one does not answer. A call that the caller
cancelled before the server began is not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from cluster.core.errors import PilotfishError
from cluster.wire.status import to_status
from deploy.simulation.virtual_time import Process, current_process
from deploy.simulation.weather import Fate, Weather

UnaryHandler = Callable[[bytes, "Call"], Awaitable[bytes]]
StreamHandler = Callable[[bytes, float], AsyncGenerator[bytes, None]]

RESET_SECONDS = 0.001
"""How soon a caller notices that the server's process has ended, in seconds."""
KEEPALIVE_SECONDS = 30.0
"""How soon a caller notices that messages are lost, in seconds: gRPC's keepalive in `cluster.wire.channel`."""
_TICK = 1e-7
"""Time between two messages that would arrive at once: timers of one instant have no order."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """What a process serves: methods by name."""

    process: Process
    unary: Mapping[str, UnaryHandler] = field(default_factory=dict)
    streams: Mapping[str, StreamHandler] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Call:
    """One call under way."""

    client: Process | None
    endpoint: Endpoint
    future: asyncio.Future[bytes]

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.future.done()


class Network:
    """Connects processes by address."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.endpoints: dict[str, Endpoint] = {}
        self.under_way = 0
        """Number of calls under way."""
        self.most_under_way = 0
        self._latest: dict[tuple[str, str], float] = {}

    def serve(self, address: str, endpoint: Endpoint) -> None:
        """Serve at an address until the process ends."""
        self.endpoints[address] = endpoint

    async def call(self, address: str, method: str, request: bytes, timeout_seconds: float) -> bytes:
        """Call a method. Raises `AioRpcError`, as a gRPC stub does."""
        client = current_process()
        if client is not None and not client.is_alive:
            raise _unavailable("the caller's process has ended")
        endpoint = self.endpoints.get(address)
        if endpoint is None or not endpoint.process.is_alive:
            await asyncio.sleep(RESET_SECONDS)
            raise _unavailable(f"{address}: connection refused")
        call = Call(client, endpoint, asyncio.get_running_loop().create_future())
        self._send_request(call, address, method, request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        reset = self._reset_when_killed(call)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await call.future
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_seconds} s") from None
        finally:
            self.under_way -= 1
            endpoint.process.on_exit.remove(reset)

    async def stream(
        self, address: str, method: str, request: bytes, timeout_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Call a streaming method. A lost message ends the stream. Raises `AioRpcError`."""
        endpoint = self.endpoints.get(address)
        if endpoint is None or not endpoint.process.is_alive:
            await asyncio.sleep(RESET_SECONDS)
            raise _unavailable(f"{address}: connection refused")
        client = current_process()
        source = "client" if client is None else client.name
        arrived: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        fate = self.weather.fate(source, address)
        server: list[asyncio.Task[None]] = []

        def begin() -> None:
            if endpoint.process.is_alive and not ended:
                handler = endpoint.streams[method](request, timeout_seconds)
                server.append(endpoint.process.spawn(self._pump(handler, source, address, arrived)))

        def reset() -> None:
            loop.call_later(RESET_SECONDS, arrived.put_nowait, _unavailable(f"{address}: connection reset"))

        ended: list[bool] = []
        if fate.is_lost:
            lost = RESET_SECONDS if fate.is_reset else KEEPALIVE_SECONDS
            loop.call_later(lost, arrived.put_nowait, _unavailable(f"{address}: no answer"))
        else:
            loop.call_later(fate.delay, begin)
        endpoint.process.on_exit.append(reset)
        late = _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        timer = loop.call_later(timeout_seconds + _TICK, arrived.put_nowait, late)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            timer.cancel()
            ended.append(True)
            endpoint.process.on_exit.remove(reset)
            for task in server:
                loop.call_later(fate.delay, task.cancel)

    async def _pump(
        self,
        items: AsyncGenerator[bytes, None],
        source: str,
        address: str,
        arrived: asyncio.Queue[bytes | Exception | None],
    ) -> None:
        """Run the server's side of a stream."""
        loop, latest = asyncio.get_running_loop(), 0.0
        last: Exception | None = None
        try:
            async with aclosing(items):
                async for item in items:
                    fate = self.weather.fate(address, source)
                    if fate.is_lost:
                        lost = RESET_SECONDS if fate.is_reset else KEEPALIVE_SECONDS
                        loop.call_later(lost, arrived.put_nowait, _unavailable(f"{address}: connection lost"))
                        return
                    latest = max(latest + _TICK, loop.time() + fate.delay)
                    loop.call_at(latest, arrived.put_nowait, item)
        except PilotfishError as error:
            last = _rpc_error(error)
        process = current_process()
        if process is None or process.is_alive:
            loop.call_at(max(latest + _TICK, loop.time()), arrived.put_nowait, last)

    def _send_request(self, call: Call, address: str, method: str, request: bytes) -> None:
        source = "client" if call.client is None else call.client.name
        fate = self.weather.fate(source, address)
        loop = asyncio.get_running_loop()
        if fate.is_lost:
            self._lose(call, fate, address)
            return
        at = loop.time() + fate.delay
        if not fate.overtakes:
            at = self._latest[source, address] = max(at, self._latest.get((source, address), 0.0) + _TICK)
        for copy in range(fate.copies):
            loop.call_at(at + copy * _TICK, self._arrive, call, address, method, request)

    def _arrive(self, call: Call, address: str, method: str, request: bytes) -> None:
        process = call.endpoint.process
        if process.is_alive and not call.is_abandoned:
            process.spawn(self._handle(call, address, method, request))

    async def _handle(self, call: Call, address: str, method: str, request: bytes) -> None:
        """Run the server's side of a unary call."""
        answer: bytes | Exception
        try:
            answer = await call.endpoint.unary[method](request, call)
        except PilotfishError as error:
            answer = _rpc_error(error)
        if not call.endpoint.process.is_alive:
            return
        source = "client" if call.client is None else call.client.name
        fate = self.weather.fate(address, source)
        if fate.is_lost:
            self._lose(call, fate, address)
        else:
            asyncio.get_running_loop().call_later(fate.delay, _resolve, call, answer)

    def _lose(self, call: Call, fate: Fate, address: str) -> None:
        seconds = RESET_SECONDS if fate.is_reset else KEEPALIVE_SECONDS
        error = _unavailable(f"{address}: connection lost")
        asyncio.get_running_loop().call_later(seconds, _resolve, call, error)

    def _reset_when_killed(self, call: Call) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def reset() -> None:
            loop.call_later(RESET_SECONDS, _resolve, call, _unavailable("connection reset by the server"))

        call.endpoint.process.on_exit.append(reset)
        return reset


class ComputeQueue:
    """One compute thread of a simulated server: calls run one after another, in order of arrival.

    A call that was abandoned before it began is not computed. One that has begun is finished.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.busy_seconds = 0.0

    async def run(
        self, call: Call, seconds: Callable[[], float], compute: Callable[[], bytes], *, always: bool = False
    ) -> bytes:
        """Compute for some seconds and return the answer. With `always`, an abandoned call is computed too."""
        async with self._turn:
            if call.is_abandoned and not always:
                raise PilotfishError("the call was cancelled")
            taken = seconds()
            self.busy_seconds += taken
            if taken > 0:
                await asyncio.sleep(taken)
            return compute()


def _resolve(call: Call, answer: bytes | Exception) -> None:
    if call.future.done():
        return
    if isinstance(answer, Exception):
        call.future.set_exception(answer)
    else:
        call.future.set_result(answer)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _unavailable(details: str) -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNAVAILABLE, details)


def _rpc_error(error: PilotfishError) -> grpc.aio.AioRpcError:
    code, details, trailing = to_status(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)
