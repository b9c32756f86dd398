"""The coordinator with its two public gRPC services on one port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.config.sections import Configuration
from cluster.core.membership import Load
from cluster.core.ports import Drafter, Target
from cluster.generation.prompt_log import PromptLog
from cluster.generation.service import GenerationService
from cluster.generation.servicer import GenerationServicer
from cluster.generation.text.tokenizer import Parsers, Tokenizer
from cluster.ingress.access.grpc_access import AccessInterceptor
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.observability.operations import OperationsServicer
from cluster.wire.coordinator_service import CoordinatorServicer
from cluster.wire.peer_access import OPEN, PeerAccess
from cluster.wire.server import (
    COORDINATOR_SERVICE,
    GENERATION_SERVICE,
    OPERATIONS_SERVICE,
    PublicOptions,
    WireServer,
)
from deploy.implied_settings import NOT_LOSSLESS
from deploy.network.tracing import make_tracer, tracer_provider
from deploy.roofline import with_prompt_tokens
from pilotfish.v1 import coordinator_pb2_grpc, generation_pb2_grpc, operations_pb2_grpc

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 0.25
"""How often the readiness of the coordinator is copied to `grpc.health.v1`."""
_READY_POLL_SECONDS = 0.01
_CLOSING_SECONDS = 1.0
"""How long the gRPC server waits for running calls when it stops. All answers have ended before."""


class CoordinatorServer:
    """A coordinator and its gRPC server. Listens after `start()`; ready once the target has sent its `TargetInfo`.

    It listens on the public address, where it demands one of `keys`, or, where an ingress does that, on a free port of
    `internal_host`, where it demands `access`.
    """

    def __init__(
        self,
        configuration: Configuration,
        target: Target,
        drafters: Sequence[Drafter] = (),
        internal_host: str | None = None,
        access: PeerAccess = OPEN,
        keys: KeyRing | None = None,
    ) -> None:
        self._configuration = configuration
        self._metrics = Metrics()
        endpoint = configuration.server.otlp_endpoint
        self._traces = None if endpoint is None else tracer_provider(endpoint, "pilotfish-coordinator")
        tracer = None if self._traces is None else make_tracer(self._traces)
        settled = with_prompt_tokens(configuration)
        self.coordinator = Coordinator(target, drafters, settled, self._metrics, tracer=tracer)
        self._is_internal = internal_host is not None
        server = configuration.server
        self._server = WireServer(
            server.grpc_host if internal_host is None else internal_host,
            server.grpc_port if internal_host is None else 0,
            # An ingress has bounded what clients send, and its own messages are longer.
            max_message_bytes=configuration.limits.max_body_bytes if internal_host is None else MAX_MESSAGE_BYTES,
            access=OPEN if internal_host is None else access,
            interceptors=() if keys is None else (AccessInterceptor(keys),),
            public=PublicOptions(server.tls if internal_host is None else None),
        )
        self._prompt_log = PromptLog.of(configuration.draft)
        self._opening: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.coordinator.ready

    @property
    def load(self) -> Load:
        """How busy the coordinator and its target are."""
        return self.coordinator.load

    async def start(self) -> int:
        """Start listening and return the bound port. Raises `ConfigurationError` if the model has no tokenizer."""
        configuration = self._configuration
        parsers = Parsers(configuration.target.tool_parser, configuration.target.reasoning_parser)
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(configuration.target.path), parsers)
        generation = GenerationService(
            self.coordinator,
            tokenizer,
            configuration.limits,
            draft_method=configuration.draft.name,
            aliases=configuration.target.aliases,
            shares_between_keys=configuration.server.sharing_between_keys == "on",
            learns_from=configuration.draft.learns_from,
            prompt_log=self._prompt_log,
        )
        if self._prompt_log is not None:
            self._prompt_log.start()
        servicer = GenerationServicer(generation, traces=self._traces is not None)
        self._server.add(GENERATION_SERVICE, generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
        if self._is_internal:
            self._server.add(
                COORDINATOR_SERVICE,
                coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server,
                CoordinatorServicer(servicer.responses),
            )
        self._server.add(
            OPERATIONS_SERVICE,
            operations_pb2_grpc.add_OperationsServiceServicer_to_server,
            OperationsServicer(self._metrics, generation.abort),
        )
        port = await self._server.start()
        self._opening = asyncio.create_task(self._open())
        return port

    def check_health(self) -> None:
        """Raise the error that prevents the coordinator from becoming ready or from making progress."""
        if self._opening is not None and self._opening.done() and not self._opening.cancelled():
            self._opening.result()
        self.coordinator.check_health()

    async def wait_until_ready(self) -> None:
        """Return once requests are accepted. Raises the error that prevents it."""
        while not self.ready:
            self.check_health()
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, wait up to `drain_seconds` for the running ones, then close."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._set_health(False)
        await self.coordinator.stop(drain_seconds)
        await self._server.stop(_CLOSING_SECONDS)
        if self._prompt_log is not None:
            await asyncio.to_thread(self._prompt_log.close)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.shutdown)

    async def _open(self) -> None:
        """Connect to the target, then keep `grpc.health.v1` up to date."""
        await self.coordinator.start()
        info = self.coordinator.info
        logger.info(
            "ready: %s in %s, context of %d tokens, %d KV blocks",
            info.model,
            info.dtype,
            info.max_context_len,
            info.kv.blocks_total,
        )
        if not info.is_lossless:
            logger.warning(NOT_LOSSLESS)
        serving = False
        while True:
            if self.coordinator.ready != serving:
                serving = not serving
                await self._set_health(serving)
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _set_health(self, serving: bool) -> None:
        for service in (GENERATION_SERVICE, OPERATIONS_SERVICE):
            await self._server.set_serving(service, serving)
