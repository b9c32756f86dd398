"""A gRPC server that says who it is, refuses what it cannot read, and survives its servicers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import unknown_fields
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.errors import ConfigurationError, InvalidRequest, PilotfishError
from cluster.wire.address import join_host_port
from cluster.wire.channel import message_options
from cluster.wire.status import to_status

logger = logging.getLogger(__name__)

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)
_MOST_SEARCHED = 10_000
"""Messages within a message that are searched to name an unknown field."""


class WireServer:
    """`async with WireServer(host, port) as server`: stopped at the end, started by `start()`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._credentials = credentials
        self._options = (*message_options(max_message_bytes), *_SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._services: list[tuple[str, Callable[[Any, Any], None], object]] = []
        self._guard = _Guard()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0.0)

    def add(self, service_name: str, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Offer a service; before `start`."""
        self._services.append((service_name, add_to_server, servicer))

    async def start(self) -> int:
        """Listen; returns the port. Raises `ConfigurationError` when the address cannot be bound."""
        self._guard = _Guard()  # one that was stopped may be started again
        server = grpc.aio.server(interceptors=(self._guard,), options=self._options)
        for _, add_to_server, servicer in self._services:
            add_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [name for name, _, _ in self._services]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        for name in names:
            await self.set_serving(name, False)
        address = join_host_port(self._host, self._port)
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            port = 0
            reason = error
        else:
            reason = RuntimeError("no port was given")
        if port == 0:
            raise ConfigurationError(f"gRPC cannot listen on {address}: {reason}")
        await server.start()
        self._server = server
        await self.set_serving("", True)
        return int(port)

    async def set_serving(self, service_name: str, serving: bool) -> None:
        """What `grpc.health.v1` answers for the service; `""` is the process."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service_name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls, let the running ones end within `grace_seconds`, cancel the rest."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            self._guard.end_idle()
            await server.stop(grace_seconds)


class _Unreadable:
    """A message that could not be parsed, kept until its call can be answered."""

    def __init__(self, size: int, reason: str) -> None:
        self.error = InvalidRequest("message", f"{size} bytes", f"a readable message ({reason})")


class _Guard(grpc.aio.ServerInterceptor):
    """Around every call of our services: parse errors, unknown fields and exceptions become statuses."""

    def __init__(self) -> None:
        self._reading: set[asyncio.Task[Any]] = set()
        self._ending = asyncio.Event()

    def end_idle(self) -> None:
        """End every stream whose client asks for nothing now, and the others when they have been answered."""
        self._ending.set()
        for reading in self._reading:
            reading.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a Pilotfish method; leave health and reflection as they are."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/pilotfish."):
            return handler
        deserializer = _tolerant(handler.request_deserializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary), deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream), deserializer, handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._conversation(handler.stream_stream), deserializer, handler.response_serializer
            )
        return handler

    def _conversation(
        self, behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]]
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            async with (
                _told(context),
                aclosing(self._requests(context)) as requests,
                aclosing(behaviour(requests, context)) as answers,
            ):
                async for answer in answers:
                    yield answer

        return call

    async def _requests(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Message, None]:
        """One after another, until the client or the server ends. Raises `InvalidRequest`."""
        while not self._ending.is_set():
            reading: asyncio.Task[Any] = asyncio.ensure_future(context.read())
            self._reading.add(reading)
            try:
                request = await reading
            except asyncio.CancelledError:
                if not self._ending.is_set():
                    raise
                request = grpc.aio.EOF
            finally:
                self._reading.discard(reading)
            if request is grpc.aio.EOF:
                return
            yield readable(request)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            return _Unreadable(len(data), f"valid UTF-8 and protobuf: {error}")

    return parse


def _unary(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _told(context):
            return await behaviour(readable(request), context)

    return call


def _stream(behaviour: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with _told(context):
            answers = behaviour(readable(request), context)
            try:
                async for answer in answers:
                    yield answer
            finally:
                # The client may be gone: whatever the servicer holds is given back now, not when it is collected.
                close = getattr(answers, "aclose", None)
                if close is not None:
                    await close()

    return call


@asynccontextmanager
async def _told(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """What is raised within is told to the client."""
    try:
        yield
    except Exception as error:
        await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, PilotfishError):
        code, message, metadata = to_status(error)
        await context.abort(code, message, metadata)
    if isinstance(error, NotImplementedError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not served")
    logger.error("a call failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says why")


def readable(request: Message | _Unreadable) -> Message:
    """The request, if all of it was understood. Raises `InvalidRequest`.

    Whether something was not is asked of protobuf itself, since a message may hold millions of others and a walk
    through them would hold up everybody; only the search for its name walks, and not far.
    """
    if isinstance(request, _Unreadable):
        raise request.error
    understood = type(request)()
    understood.CopyFrom(request)
    understood.DiscardUnknownFields()
    if understood.ByteSize() != request.ByteSize():
        field = _unknown_field(request) or "message"
        raise InvalidRequest(field, "an unknown field", f"one of the fields of {request.DESCRIPTOR.full_name}")
    return request


def _unknown_field(message: Message) -> str | None:
    """The path of the first field that the schema does not know; `None` when it lies too far back."""
    for path, part in itertools.islice(_parts(message, ""), _MOST_SEARCHED):
        unknown: Any = unknown_fields.UnknownFieldSet(part)
        for field in unknown:
            return f"{path}field {field.field_number}"
    return None


def _parts(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """The message and all within it, each with the prefix of its fields' paths."""
    yield path, message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        values = value if descriptor.is_repeated else (value,)
        for index, inner in enumerate(values):
            name = f"{descriptor.name}[{index}]" if descriptor.is_repeated else descriptor.name
            yield from _parts(inner, f"{path}{name}.")
