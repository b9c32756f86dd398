"""The gRPC API of an ingress: the public services on the public port, over a client of the coordinators."""

from __future__ import annotations

import asyncio

from cluster.core.config.sections import LimitsSection
from cluster.core.config.server import ServerSection
from cluster.ingress.access.grpc_access import AccessInterceptor
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.client import FullClient
from cluster.ingress.grpc import RoutedGenerationServicer
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from cluster.ingress.observability.operations import RoutedOperationsServicer
from cluster.wire.server import GENERATION_SERVICE, OPERATIONS_SERVICE, PublicOptions, WireServer
from pilotfish.v1 import generation_pb2_grpc, operations_pb2_grpc

_HEALTH_SECONDS = 0.5
"""How often the readiness of the coordinators is copied to `grpc.health.v1`, in seconds."""


class IngressServer:
    """Serves from `start()` to `stop()`. Several of one node share the port, and the kernel spreads the connections."""

    def __init__(
        self,
        client: FullClient,
        server: ServerSection,
        limits: LimitsSection,
        keys: KeyRing,
        metrics: IngressMetrics,
    ) -> None:
        """What it refuses is counted in `metrics`."""
        self._client = client

        def listener(port: int) -> WireServer:
            return WireServer(
                server.grpc_host,
                port,
                max_message_bytes=limits.max_body_bytes,
                interceptors=(AccessInterceptor(keys, metrics.refused_over_grpc),),
                public=PublicOptions(server.tls, shares_port=True, on_error=metrics.refused_over_grpc),
            )

        public = listener(server.grpc_port)
        public.add(
            GENERATION_SERVICE,
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            RoutedGenerationServicer(client, limits.max_timeout_seconds, traces=server.otlp_endpoint is not None),
        )
        operations = public if server.operations_port is None else listener(server.operations_port)
        operations.add(
            OPERATIONS_SERVICE,
            operations_pb2_grpc.add_OperationsServiceServicer_to_server,
            RoutedOperationsServicer(client, metrics),
        )
        self._services = {GENERATION_SERVICE: public, OPERATIONS_SERVICE: operations}
        self._has_own_operations = operations is not public
        self.operations_port: int | None = None
        """The port of the operations service, if it has one of its own and listens."""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start listening and return the port. Raises `ConfigurationError` if an address cannot be bound."""
        port = await self._services[GENERATION_SERVICE].start()
        if self._has_own_operations:
            self.operations_port = await self._services[OPERATIONS_SERVICE].start()
        self._watching = asyncio.create_task(self._watch(), name="ingress-health")
        return port

    def check_health(self) -> None:
        """Raise the error that has ended the copying of readiness."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new calls, wait up to `drain_seconds` for the running ones, then close. Again, it does nothing."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await asyncio.gather(*(server.stop(drain_seconds) for server in set(self._services.values())))

    async def _watch(self) -> None:
        """Keep `grpc.health.v1` up to date."""
        serving = False
        while True:
            if await self._client.is_ready() != serving:
                serving = not serving
                for service, server in self._services.items():
                    await server.set_serving(service, serving)
            await asyncio.sleep(_HEALTH_SECONDS)
