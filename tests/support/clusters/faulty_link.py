"""A gRPC proxy between two processes of a cluster that disturbs the messages between them.

It forwards every call as bytes, whatever the service. Draws come from a seed. A link keeps its address while the
process behind it dies and starts again at another port.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.wire.channel import message_options, open_channel

MAX_BYTES = 64 << 20
LOOPBACK = "127.0.0.1"
LONGEST_CALL_SECONDS = 600.0
REPEATABLE = ("Step", "Open", "Release", "GetInfo", "Propose", "Heartbeat")
"""Methods whose calls may be repeated. A request to generate is never sent twice."""


@dataclass(frozen=True)
class FaultRates:
    """Probabilities per message, and the longest delay in seconds."""

    drop: float = 0.0
    """A message is lost, and its caller waits for its timeout. A stream to a client ends: gRPC skips nothing."""
    delay: float = 0.0
    """A message comes later, and so after messages of other calls that were sent after it."""
    repeat: float = 0.0
    """A request is computed, its answer is lost, and it is sent again."""
    cut: float = 0.0
    """The call ends as if the connection were lost."""
    longest_delay: float = 0.3


UNDISTURBED = FaultRates()


class FaultyLink:
    """Forwards calls to the address that `resolve` returns, between `start()` and `stop()`."""

    def __init__(self, resolve: Callable[[], Awaitable[str]], draw: random.Random) -> None:
        self.rates = UNDISTURBED
        self.counts: Counter[str] = Counter()
        """Number of disturbed messages by kind."""
        self.address = ""
        self._resolve = resolve
        self._draw = draw
        self._server: grpc.aio.Server | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def start(self) -> str:
        """Listen on a free port of this machine, and return the address."""
        self._server = server = grpc.aio.server(options=message_options(MAX_BYTES))
        server.add_generic_rpc_handlers((_Forwarding(self._forward),))
        self.address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
        await server.start()
        return self.address

    async def stop(self) -> None:
        """Cut all calls and close all connections."""
        if self._server is not None:
            await self._server.stop(0.0)
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[bytes, None]:
        await self._maybe_cut(context)
        channel = await self._channel(context)
        metadata = tuple((key, value) for key, value in context.invocation_metadata() or () if key != "user-agent")
        call = channel.stream_stream(method)(
            self._disturbed_requests(requests, channel, method, metadata),
            metadata=metadata,
            timeout=context.time_remaining(),
        )
        try:
            async for answer in call:
                await self._maybe_cut(context)
                await self._maybe_delay()
                if not self._happens("drop", self.rates.drop):
                    yield answer
                elif method.endswith("/Generate"):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()

    async def _disturbed_requests(
        self, requests: AsyncIterator[bytes], channel: grpc.aio.Channel, method: str, metadata: Any
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            await self._maybe_delay()
            if not method.endswith("/Generate") and self._happens("drop", self.rates.drop):
                await asyncio.sleep(LONGEST_CALL_SECONDS)  # the caller gives up before
            if method.endswith(REPEATABLE) and self._happens("repeat", self.rates.repeat):
                await self._send_alone(channel, method, metadata, request)
            yield request

    async def _send_alone(self, channel: grpc.aio.Channel, method: str, metadata: Any, request: bytes) -> None:
        """Send a request in a call of its own and throw its answer away."""

        async def one() -> AsyncIterator[bytes]:
            yield request

        call = channel.stream_stream(method)(one(), metadata=metadata)
        try:
            await call.read()
        except grpc.aio.AioRpcError:
            pass
        finally:
            call.cancel()

    async def _channel(self, context: grpc.aio.ServicerContext[Any, Any]) -> grpc.aio.Channel:
        try:
            address = await self._resolve()
        except Exception as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"no address: {error}")
        for old in [known for known in self._channels if known != address]:
            await self._channels.pop(old).close()  # nothing listens there any more
        if address not in self._channels:
            self._channels[address] = open_channel(address, max_message_bytes=MAX_BYTES)
        return self._channels[address]

    async def _maybe_cut(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._happens("cut", self.rates.cut):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")

    async def _maybe_delay(self) -> None:
        if self._happens("delay", self.rates.delay):
            await asyncio.sleep(self._draw.uniform(0.0, self.rates.longest_delay))

    def _happens(self, kind: str, probability: float) -> bool:
        if not probability or self._draw.random() >= probability:
            return False
        self.counts[kind] += 1
        return True


class _Forwarding(grpc.GenericRpcHandler):
    """Handles every method of every service in the same way. At the wire, every call is a pair of streams."""

    def __init__(self, forward: Callable[..., AsyncGenerator[bytes, None]]) -> None:
        self._forward = forward

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method

        async def forward(requests: Any, context: Any) -> AsyncIterator[bytes]:  # gRPC wants a generator function
            async with aclosing(self._forward(method, requests, context)) as answers:
                async for answer in answers:
                    yield answer

        return grpc.stream_stream_rpc_method_handler(forward)
