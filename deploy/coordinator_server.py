"""The coordinator's process: the loop, and the two public services that speak for it on one port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config import Configuration
from cluster.core.ports import Drafter, Target
from cluster.ingress.grpc import GenerationServicer, OperationsServicer
from cluster.ingress.service import GenerationService
from cluster.ingress.text.tokenizer import Tokenizer
from cluster.wire.connection import Resolve
from cluster.wire.server import WireServer
from deploy.lossless import NOT_LOSSLESS
from pilotfish.v1 import generation_pb2_grpc, operations_pb2_grpc

logger = logging.getLogger(__name__)

GENERATION_SERVICE = "pilotfish.v1.GenerationService"
OPERATIONS_SERVICE = "pilotfish.v1.OperationsService"

_HEALTH_SECONDS = 0.25
"""How often readiness is looked at."""
_READY_POLL_SECONDS = 0.01
_CLOSING_SECONDS = 1.0
"""How long the last words may take to reach their clients once every answer has ended."""


class CoordinatorServer:
    """Listens from `start()` on; is ready once the target has told what it is."""

    def __init__(self, configuration: Configuration, target: Target, drafters: Sequence[Drafter]) -> None:
        self._configuration = configuration
        self._metrics = Metrics()
        self._coordinator = Coordinator(target, drafters, configuration, self._metrics)
        self._server = WireServer(
            configuration.server.grpc_host,
            configuration.server.grpc_port,
            max_message_bytes=configuration.limits.max_body_bytes,
        )
        self._opening: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._coordinator.ready

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `ConfigurationError` for a directory without a tokenizer."""
        configuration = self._configuration
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(configuration.target.path))
        generation = GenerationService(
            self._coordinator, tokenizer, configuration.limits, draft_method=configuration.draft.method
        )
        self._server.add(
            GENERATION_SERVICE,
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            GenerationServicer(generation),
        )
        self._server.add(
            OPERATIONS_SERVICE,
            operations_pb2_grpc.add_OperationsServiceServicer_to_server,
            OperationsServicer(self._metrics),
        )
        port = await self._server.start()
        self._opening = asyncio.create_task(self._open())
        return port

    def check_health(self) -> None:
        """Raise what keeps this process from ever being ready."""
        if self._opening is not None and self._opening.done() and not self._opening.cancelled():
            self._opening.result()

    async def wait_until_ready(self) -> None:
        """Return once requests are taken. Raises what prevents it."""
        while not self.ready:
            self.check_health()
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def stop(self, drain_seconds: float) -> None:
        """Take no new requests, let the running ones end within `drain_seconds`, then close."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._tell(ready=False)
        await self._coordinator.stop(drain_seconds)
        await self._server.stop(_CLOSING_SECONDS)

    async def _open(self) -> None:
        """Meet the target, then let `grpc.health.v1` say what the coordinator says of itself."""
        await self._coordinator.start()
        logger.info("ready: %s", self._coordinator.info)
        if not self._coordinator.info.is_lossless:
            logger.warning(NOT_LOSSLESS)
        told = False
        while True:
            if self._coordinator.ready != told:
                told = not told
                await self._tell(ready=told)
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _tell(self, ready: bool) -> None:
        for service in (GENERATION_SERVICE, OPERATIONS_SERVICE):
            await self._server.set_serving(service, ready)


def fixed_address(address: str) -> Resolve:
    """Where a server that never moves is."""

    async def resolve() -> str:
        return address

    return resolve
