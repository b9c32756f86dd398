"""The interceptor around every call of a Pilotfish service."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast

import grpc
from google.protobuf import unknown_fields
from google.protobuf.message import DecodeError, Message

from cluster.core.errors import InvalidRequest, PilotfishError, WorkerUnavailable
from cluster.wire.peer_access import TOKEN_KEY, ClusterToken
from cluster.wire.status import Metadata, to_status

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed", bound=Message)
OnError = Callable[[Exception], None] | None

_MAX_SEARCHED = 10_000
"""Nested messages that are searched for the name of an unknown field."""


class _Unreadable:
    """Stands for a message that cannot be parsed until its call is answered with the error."""

    def __init__(self, size: int, reason: str) -> None:
        self.error = InvalidRequest("message", f"{size} bytes", f"a readable message ({reason})")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Converts unreadable messages, unknown fields and exceptions to gRPC statuses, for all Pilotfish services."""

    def __init__(self, on_error: OnError = None) -> None:
        """`on_error` is called with each error that ends a call."""
        self._on_error = on_error
        self._reading: set[asyncio.Task[Any]] = set()
        self._ending = asyncio.Event()

    def end_idle(self) -> None:
        """End every bidirectional stream: at once if it waits for a request, else after its current response."""
        self._ending.set()
        for reading in self._reading:
            reading.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a Pilotfish method. Health and reflection are left unchanged."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/pilotfish."):
            return handler
        deserializer = _deferring_errors(handler.request_deserializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary_unary(handler.unary_unary, self._on_error), deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _unary_stream(handler.unary_stream, self._on_error), deserializer, handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._stream_stream(handler.stream_stream), deserializer, handler.response_serializer
            )
        return handler

    def _stream_stream(
        self, behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]]
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            async with (
                _errors_as_status(context, self._on_error),
                aclosing(self._requests(context)) as requests,
                aclosing(behaviour(requests, context)) as answers,
            ):
                async for answer in answers:
                    yield answer

        return call

    async def _requests(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Message, None]:
        """Yield the requests of a stream until the client or the server ends it. Raises `InvalidRequest`."""
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


def _deferring_errors(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            return _Unreadable(len(data), f"valid UTF-8 and protobuf: {error}")

    return parse


def _unary_unary(
    behaviour: Callable[[Any, Any], Awaitable[Any]], on_error: OnError
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _errors_as_status(context, on_error):
            return await behaviour(readable(request), context)

    return call


def _unary_stream(
    behaviour: Callable[[Any, Any], AsyncIterator[Any]], on_error: OnError
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with _errors_as_status(context, on_error):
            answers = behaviour(readable(request), context)
            try:
                async for answer in answers:
                    yield answer
            finally:
                # The client may have disconnected. Close the generator now, not at garbage collection.
                close = getattr(answers, "aclose", None)
                if close is not None:
                    await close()

    return call


@asynccontextmanager
async def _errors_as_status(context: grpc.aio.ServicerContext[Any, Any], on_error: OnError) -> AsyncIterator[None]:
    """Send an exception of the block to the client as a status."""
    try:
        yield
    except Exception as error:
        if on_error is not None:
            on_error(error)
        await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    await context.abort(*status_of(error))


def status_of(error: Exception) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return the status, message and trailing metadata of an error. One that is not expected is logged."""
    if isinstance(error, PilotfishError):
        return to_status(error)
    logger.error("a call failed with an unexpected error", exc_info=error)
    return to_status(WorkerUnavailable("the server failed; its log has the cause"), grpc.StatusCode.INTERNAL)


def parsed(kind: type[Parsed], data: bytes) -> Parsed:
    """Parse a message inside another one. Raises `InvalidRequest` if it is unreadable or has unknown fields."""
    message: Any = _deferring_errors(kind.FromString)(data)
    readable(message)
    return cast("Parsed", message)


def readable(request: Message | _Unreadable) -> Message:
    """Return the request. Raises `InvalidRequest` if it is unreadable or has unknown fields.

    Protobuf itself compares the sizes with and without unknown fields, because a walk in Python through millions of
    nested messages would block the event loop. Only the search for the name of the field walks, and it is bounded.
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
    """Return the path of the first unknown field; `None` if it is not among the first messages."""
    for path, part in itertools.islice(_parts(message, ""), _MAX_SEARCHED):
        unknown: Any = unknown_fields.UnknownFieldSet(part)
        for field in unknown:
            return f"{path}field {field.field_number}"
    return None


def _parts(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """Yield the message and all nested ones, each with the prefix of the paths of its fields."""
    yield path, message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        values = value if descriptor.is_repeated else (value,)
        for index, inner in enumerate(values):
            name = f"{descriptor.name}[{index}]" if descriptor.is_repeated else descriptor.name
            yield from _parts(inner, f"{path}{name}.")


HEALTH_METHODS = "/grpc.health.v1.Health/"
"""Prefix of the methods of health checks. They need no credential, because probes have none."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call without the token as UNAUTHENTICATED, before a message is read. Health checks are open."""

    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler for a call with the token, otherwise a handler that refuses the call."""
        if handler_call_details.method.startswith(HEALTH_METHODS) or self._is_presented(handler_call_details):
            return await continuation(handler_call_details)
        # A handler of streams, for every kind of method: gRPC does not wait for a message before it calls it.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _is_presented(self, details: grpc.HandlerCallDetails) -> bool:
        presented = [value for key, value in details.invocation_metadata or () if key == TOKEN_KEY]
        return len(presented) == 1 and self._token.is_equal_to(presented[0])


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED)
