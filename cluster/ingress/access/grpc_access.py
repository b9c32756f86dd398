"""API keys over gRPC: an interceptor that refuses callers without a key and names the caller in requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import Message

from cluster.core.errors import PermissionDenied, PilotfishError, Unauthenticated
from cluster.ingress.access.api_keys import ApiKey
from cluster.ingress.access.key_ring import KeyRing, bearer_key
from cluster.wire.interceptor import HEALTH_METHODS
from cluster.wire.status import to_status
from pilotfish.v1 import generation_pb2, operations_pb2

AUTHORIZATION = "authorization"
"""Key of the call metadata that holds the API key, as `Bearer KEY`."""
_ADMIN_METHODS = "/pilotfish.v1.OperationsService/"
_ABORTS = (generation_pb2.AbortRequest, operations_pb2.AbortRequestRequest)
"""Messages whose client is that of the request to end, which may be another one than the caller."""


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without an API key as UNAUTHENTICATED and what the key does not allow as PERMISSION_DENIED.

    Both happen before a message is read. Health checks are open. Of the other calls, the messages get the name of the
    caller, whatever they said before: where no keys are demanded, none.
    """

    def __init__(self, keys: KeyRing, on_refusal: Callable[[PilotfishError], None] | None = None) -> None:
        """`on_refusal` is called with the error of each refused call."""
        self._keys = keys
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, or one that refuses the call."""
        method = handler_call_details.method
        if method.startswith(HEALTH_METHODS):
            return await continuation(handler_call_details)
        if not self._keys.demands_keys:
            return _naming(await continuation(handler_call_details), lambda request: _name(request, None))
        try:
            key = self._identify(handler_call_details)
            if method.startswith(_ADMIN_METHODS) and not key.is_admin:
                raise PermissionDenied("the API key does not allow this: it needs the key of an operator")
        except PilotfishError as error:
            if self._on_refusal is not None:
                self._on_refusal(error)
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        handler = await continuation(handler_call_details)
        return handler if key.is_internal else _naming(handler, lambda request: _name(request, key))

    def _identify(self, details: grpc.HandlerCallDetails) -> ApiKey:
        found = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION]
        if len(found) > 1:
            raise Unauthenticated("one API key is needed: the call has several")
        value = found[0] if found else ""
        return self._keys.identify(bearer_key(value.decode("latin-1") if isinstance(value, bytes) else value))


def _name(request: Any, key: ApiKey | None) -> None:
    """Write the caller into a request that names a client. An operator may abort requests of others.

    What stands for an unreadable message is left to `CallInterceptor`, which refuses it.
    """
    if not _names_client(request):
        return
    if key is not None and key.is_admin and request.client and isinstance(request, _ABORTS):
        return
    request.client = "" if key is None else key.name
    if isinstance(request, generation_pb2.GenerateRequest):
        request.client_allows_learning = key is not None and key.allows_learning


def _names_client(request: object) -> bool:
    return isinstance(request, Message) and "client" in request.DESCRIPTOR.fields_by_name


def _naming(handler: Any, name: Callable[[Any], None]) -> Any:
    """Return a handler that calls `name` with each request first."""
    if handler is None:
        return None
    if handler.unary_unary is not None:

        async def unary_unary(request: Any, context: Any) -> Any:
            name(request)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            unary_unary, handler.request_deserializer, handler.response_serializer
        )
    if handler.unary_stream is not None:

        async def unary_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            name(request)
            async with aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    yield response

        return grpc.unary_stream_rpc_method_handler(
            unary_stream, handler.request_deserializer, handler.response_serializer
        )
    return handler


def _refusal(error: PilotfishError) -> Callable[[object, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]:
    """Return a handler of streams, for every kind of method: gRPC does not wait for a message before it calls it."""
    code, message, metadata = to_status(error)

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, message, metadata)

    return refuse
