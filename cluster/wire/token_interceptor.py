"""The interceptor that refuses calls without the cluster token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cluster.wire.peer_access import TOKEN_KEY, ClusterToken

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
