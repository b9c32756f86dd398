"""The Serve deployment of the public APIs: HTTP behind Serve's proxy, and gRPC.

This process does not import torch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from cluster.core.membership import MemberRole, View
from cluster.ingress.access.api_keys import ApiKey
from cluster.ingress.access.browsers import BrowserRules
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.access.public_client import PublicClient
from cluster.ingress.endpoints.page import Page
from cluster.ingress.http import create_app
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.coordinator_client import CoordinatorClient
from cluster.wire.peer_access import PeerAccess
from deploy.network.exposure import exposure_warning
from deploy.network.tracing import make_call_tracer, tracer_provider
from deploy.ray.directory import DirectoryClient, member_id
from deploy.ray.ingress_server import IngressServer
from deploy.ray.running_serve import with_proxy_address
from deploy.settings import GARBAGE_THRESHOLD
from workers.serve.configuration import load_configuration
from workers.serve.logs import set_logging

logger = logging.getLogger(__name__)


@serve.ingress()
class IngressReplica:
    """The Serve replica that runs the HTTP API, behind Serve's proxy, and the gRPC API on the public port.

    It holds no state of its own. It finds the coordinators in the directory and is a gRPC client of them.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        access: PeerAccess,
        api_keys: Sequence[ApiKey],
        *_: DeploymentHandle[Any],
    ) -> None:
        gc.set_threshold(GARBAGE_THRESHOLD)
        configuration = load_configuration(values)
        own_key = None if access.token is None else access.token.api_key()
        self._keys = KeyRing(api_keys, configuration.server.api_key_file, own_key)
        context = serve.get_replica_context()
        self._limits, self._section = configuration.limits, configuration.server
        self._application = context.app_name
        self._drain_seconds = configuration.server.drain_timeout_seconds
        server = configuration.server
        router = Router(
            lambda: self._directory.view.of(MemberRole.TARGET),  # also those that drain
            lambda address: CoordinatorClient(fixed_address(address), access),
            shares_between_keys=server.sharing_between_keys == "on",
        )
        self._directory = DirectoryClient(
            context.app_name,
            on_view=lambda _: router.note_members(),
            on_drain=lambda _: router.drain(),
            is_complete=lambda view: bool(view.of(MemberRole.TARGET)) and not router.waiting,
        )
        self._browsers = BrowserRules(server.cors_origins, server.allowed_hosts)
        self._client = PublicClient(router, lambda name: self._keys.limits_of(name) or server.client_limits)
        self._metrics = IngressMetrics(member_id(context))
        self._server = IngressServer(self._client, server, configuration.limits, self._keys, self._metrics)
        endpoint = server.otlp_endpoint
        self._traces = None if endpoint is None else tracer_provider(endpoint, "pilotfish-ingress")
        self._is_started = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The ASGI application. Serve asks for it once the replica is constructed."""
        # Serve's proxy adds the header with the request's id.
        tracer = None if self._traces is None else make_call_tracer(self._traces)
        return create_app(
            self._client,
            self._limits,
            adds_request_id=False,
            keys=self._keys,
            metrics=self._metrics,
            page=self._page(),
            tracer=tracer,
            browsers=self._browsers,
        )

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start to listen on the first call. Serve calls this before the replica is healthy."""
        set_logging(user_config["log_level"], user_config["log_format"], "ingress")
        if not self._is_started:
            self._is_started = True
            self._directory.start()
            await self._server.start()
            server = await asyncio.to_thread(with_proxy_address, self._section)
            if (warning := exposure_warning(server, demands_keys=self._keys.demands_keys)) is not None:
                logger.warning(warning)

    async def check_health(self) -> None:
        """Raise an error if this replica is unusable, so that Serve replaces it."""
        self._directory.check_health()
        self._server.check_health()

    async def __del__(self) -> None:
        """Let running calls end, then stop. Serve awaits this when it stops the replica."""
        await self._server.stop(self._drain_seconds)
        await self._directory.stop()
        await self._client.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.shutdown)

    def _page(self) -> Page | None:
        """The page, unless it is turned off."""
        if self._section.page == "off":
            return None
        return Page(self._section.grpc_port, self._kill_drafter if self._section.demo == "on" else None)

    async def _kill_drafter(self) -> bool:
        await self._directory.beat()  # a drafter may be newer than the last view
        return await kill_drafter(self._directory.view, self._application)


_NAMESPACE = "serve"
"""Where Serve keeps the actors of replicas."""


async def kill_drafter(view: View, application: str) -> bool:
    """Kill the process of a random drafter in the view. Returns whether there was one."""
    drafters = view.of(MemberRole.DRAFTER)
    if not drafters:
        return False
    deployment, _, unique_id = random.choice(drafters).id.partition("-")  # noqa: S311 - any of them will do
    return await asyncio.to_thread(_kill, f"SERVE_REPLICA::{application}#{deployment.capitalize()}#{unique_id}")


def _kill(actor: str) -> bool:
    try:
        ray.kill(ray.get_actor(actor, namespace=_NAMESPACE))
    except (ValueError, RayError):  # it has ended since the last heartbeat
        return False
    return True
