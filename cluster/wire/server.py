"""A gRPC server with health checks, reflection and errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.errors import ConfigurationError
from cluster.wire.address import join_host_port
from cluster.wire.channel import message_options
from cluster.wire.interceptor import CallInterceptor, TokenInterceptor
from cluster.wire.peer_access import OPEN, PeerAccess
from cluster.wire.tls import server_credentials

logger = logging.getLogger(__name__)

GENERATION_SERVICE = "pilotfish.v1.GenerationService"
OPERATIONS_SERVICE = "pilotfish.v1.OperationsService"
COORDINATOR_SERVICE = "pilotfish.v1.CoordinatorService"

_LATE_SECONDS = 10.0
"""Longest time, after its calls were cancelled, that a server may take to stop, in seconds. Then it is left behind."""
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class PublicOptions:
    """Options of a server that clients from outside of the cluster call."""

    tls: PublicTlsSection | None = None
    """TLS in place of that of the internal services."""
    shares_port: bool = False
    """Whether other servers with this option may listen on the same port of the same machine."""
    on_error: Callable[[Exception], None] | None = None
    """Called with each error that ends a call."""


class WireServer:
    """A gRPC server for Pilotfish services. `start()` starts it; `async with` stops it at the end of the block.

    Every call of an internal service, except a health check, must satisfy `access`. `interceptors` see a call before
    its messages.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        access: PeerAccess = OPEN,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        public: PublicOptions = PublicOptions(),
    ) -> None:
        self._host = host
        self._port = port
        self._access = access
        self._public = public
        self._interceptors = tuple(interceptors)
        self._options = (
            *message_options(max_message_bytes),
            *_SERVER_OPTIONS,
            ("grpc.so_reuseport", int(public.shares_port)),
        )
        self._health = health.aio.HealthServicer()
        self._services: list[tuple[str, Callable[[Any, Any], None], object]] = []
        self._interceptor = CallInterceptor(public.on_error)
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    def add(self, service_name: str, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Add a service. Must be called before `start`."""
        self._services.append((service_name, add_to_server, servicer))

    async def start(self) -> int:
        """Listen, and return the port. Raises `ConfigurationError` for an address or a certificate that is unusable."""
        self._interceptor = CallInterceptor(self._public.on_error)  # a stopped server may be started again
        token = self._access.token
        first = self._interceptors if token is None else (TokenInterceptor(token), *self._interceptors)
        server = grpc.aio.server(interceptors=(*first, self._interceptor), options=self._options)
        for _, add_to_server, servicer in self._services:
            add_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [name for name, _, _ in self._services]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        for name in names:
            await self.set_serving(name, False)
        address = join_host_port(self._host, self._port)
        tls = self._public.tls
        credentials = self._access.server_credentials() if tls is None else server_credentials(tls)
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            port = 0
            reason = error
        else:
            reason = RuntimeError("no port was assigned")
        if port == 0:
            raise ConfigurationError(f"gRPC cannot listen on {address}: {reason}")
        await server.start()
        self._server = server
        await self.set_serving("", True)
        return int(port)

    async def set_serving(self, service_name: str, serving: bool) -> None:
        """Set what `grpc.health.v1` reports for a service. The empty name stands for the process."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service_name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, give the running ones `grace_seconds` to end, then cancel them.

        Returns also when a call does not end: whoever stops a server must not wait for ever.
        """
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        self._interceptor.end_idle()
        stopping = asyncio.ensure_future(server.stop(grace_seconds))
        _, late = await asyncio.wait({stopping}, timeout=grace_seconds + _LATE_SECONDS)
        if late:
            logger.error("the gRPC server has not stopped %g s after its calls were cancelled", _LATE_SECONDS)
        else:
            stopping.result()
