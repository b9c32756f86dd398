"""The Serve deployments. Ray places and restarts them; gRPC carries every token.

The processes of the control plane do not import torch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.core.config.target_section import answer_version
from cluster.core.membership import Member, MemberRole, View
from cluster.core.ports import DraftMethod
from cluster.ingress.access.api_keys import ApiKey
from cluster.ingress.access.browsers import BrowserRules
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.access.public_client import PublicClient
from cluster.ingress.endpoints.page import Page
from cluster.ingress.http import create_app
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from cluster.ingress.router.choice import CoordinatorView
from cluster.ingress.router.router import Router
from cluster.wire.address import join_host_port
from cluster.wire.coordinator_client import CoordinatorClient
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.peer_access import PeerAccess
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer, fixed_address
from deploy.network.exposure import exposure_warning
from deploy.network.tracing import make_call_tracer, tracer_provider
from deploy.ray.autoscaling import reported
from deploy.ray.demo import kill_drafter
from deploy.ray.directory import DirectoryClient
from deploy.ray.drafter_follower import DrafterFollower
from deploy.ray.ingress_server import IngressServer
from deploy.ray.node_models import find_on_nodes, with_local_drafts, with_local_models
from deploy.ray.running_serve import with_proxy_address
from deploy.settings import GARBAGE_THRESHOLD
from workers.draft.registry import create, described
from workers.serve.configuration import load_configuration
from workers.serve.logs import set_logging
from workers.serve.node import compute_without_interruption, node_address, offer_to_end_first, set_threads
from workers.serve.rank_actors import RankActors, rank_kinds
from workers.serve.rank_placement import RankPlacement
from workers.serve.rank_supervisor import RankSupervisor
from workers.serve.worker_server import WorkerHost, host_draft

logger = logging.getLogger(__name__)


class TargetReplica:
    """The Serve replica of a target: the coordinator with its gRPC API, in this process, and the target's ranks.

    The ranks are actors in the further bundles of the replica's placement group. This process starts, watches and
    restarts them, and keeps the streams of its clients while they restart. It owns its target alone. It registers in
    the directory, and takes its drafters from there.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        version: str,
        threads: int,
        environment: Mapping[str, str],
        worker_host: str | None,
        access: PeerAccess,
    ) -> None:
        configuration = load_configuration(values)
        spans_nodes = worker_host is None and configuration.target.span_nodes
        if worker_host is None:
            named, configuration = configuration, with_local_models(configuration)
            if spans_nodes:
                find_on_nodes(named, configuration)
        context = serve.get_replica_context()
        self._drain_seconds = configuration.server.drain_timeout_seconds
        self._has_drafters = configuration.draft.is_enabled and not configuration.draft.is_colocated
        self._host = worker_host or node_address()
        target = configuration.target
        kinds = rank_kinds(target.tensor_parallel)
        placement = RankPlacement(
            kinds, environment, standby=target.standby, application=context.app_name, spans_nodes=spans_nodes
        )
        self._ranks = RankSupervisor(lambda: RankActors(configuration, threads, self._host, placement, access))
        step_timeout = configuration.target.step_timeout_seconds
        lease_seconds = configuration.cluster.lease_seconds
        self._target = GrpcTarget(self._ranks.address, access, step_timeout, lease_seconds)
        self._server = CoordinatorServer(configuration, self._target, internal_host=self._host, access=access)
        self._drafters = DrafterFollower(
            self._server, version, lambda address: GrpcDrafter(fixed_address(address), access, lease_seconds)
        )
        member_id = f"{answer_version(load_configuration(values).target)}:{_member_id(context)}"
        self._member = Member(MemberRole.TARGET, member_id, "", version)
        self._was_ready = False
        self._directory = DirectoryClient(
            context.app_name, self._describe, self._drafters.follow, self._drain, self._is_complete
        )
        self._draining: set[asyncio.Task[None]] = set()

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start on the first call. Serve calls this on the request event loop before the replica is healthy."""
        set_logging(user_config["log_level"], user_config["log_format"], "coordinator")
        if not self._member.address:
            _, port = await asyncio.gather(self._ranks.start(), self._server.start())
            self._member = replace(self._member, address=join_host_port(self._host, port))
            self._directory.start()

    async def check_health(self) -> None:
        """Raise an error if this replica cannot serve any more, so that Serve replaces it with all its ranks."""
        self._ranks.check_health()
        self._server.check_health()
        self._directory.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load by which Serve chooses the number of replicas. Serve calls this."""
        return reported(self._server.load)

    async def __del__(self) -> None:
        """Drain and stop. Serve calls and awaits this when it stops the replica."""
        self._drain(self._drain_seconds)
        await self._directory.beat()
        await asyncio.gather(*self._draining)
        await self._directory.stop()
        await self._drafters.close()
        await self._target.close()
        await self._ranks.stop()

    def _drain(self, seconds: float) -> None:
        """Refuse new requests, and end those that run after `seconds`."""
        self._member = replace(self._member, is_draining=True)
        self._draining.add(asyncio.create_task(self._server.stop(min(seconds, self._drain_seconds))))

    def _describe(self) -> Member | None:
        """The coordinator registers when it is ready for the first time, and stays while its ranks restart."""
        self._was_ready = self._was_ready or self._server.ready
        return replace(self._member, load=self._server.load) if self._was_ready else None

    def _is_complete(self, view: View) -> bool:
        return self._was_ready and (not self._has_drafters or bool(view.of(MemberRole.DRAFTER)))


class DraftReplica:
    """The Serve replica of a drafter: hosts one drafting method behind `DraftService`, and registers."""

    def __init__(
        self, values: Mapping[str, Any], version: str, threads: int, worker_host: str | None, access: PeerAccess
    ) -> None:
        configuration = load_configuration(values)
        self._configuration = configuration if worker_host is not None else with_local_drafts(configuration)
        context = serve.get_replica_context()
        self._threads = threads
        self._host_address = worker_host or node_address()
        self._access = access
        self._member = Member(MemberRole.DRAFTER, _member_id(context), "", version)
        self._host: WorkerHost | None = None
        self._directory = DirectoryClient(context.app_name, self._describe)

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start the drafter at the first call. Serve counts the replica as ready when this returns."""
        set_logging(user_config["log_level"], user_config["log_format"], "drafter")
        if self._host is None:
            offer_to_end_first()
            method = await asyncio.to_thread(self._load)
            lease_seconds = self._configuration.cluster.lease_seconds
            hang_seconds = self._configuration.target.step_timeout_seconds
            host = host_draft(
                self._host_address,
                method,
                self._access,
                lease_seconds=lease_seconds,
                hang_seconds=hang_seconds,
                described=described(self._configuration.draft),
            )
            await host.start()
            self._host = host
            self._member = replace(self._member, address=host.address)
            await self._directory.beat()
            self._directory.start()

    async def check_health(self) -> None:
        """Raise an error if this replica is unusable, so that Serve replaces it."""
        self._directory.check_health()
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Leave and stop. Serve awaits this when it shuts the replica down."""
        await self._directory.stop()
        if self._host is not None:
            await self._host.stop()

    def _describe(self) -> Member:
        return self._member

    def _load(self) -> DraftMethod:
        if self._configuration.draft.weights is not None:
            compute_without_interruption()
            set_threads(self._threads)
        return create(self._configuration.draft, self._configuration.target)


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
            self._coordinators,
            lambda address: CoordinatorClient(fixed_address(address), access),
            shares_between_keys=server.sharing_between_keys == "on",
        )
        self._directory = DirectoryClient(
            context.app_name,
            on_drain=lambda _: router.drain(),
            is_complete=lambda view: bool(view.of(MemberRole.TARGET)),
        )
        self._browsers = BrowserRules(server.cors_origins, server.allowed_hosts)
        self._client = PublicClient(router, lambda name: self._keys.limits_of(name) or server.client_limits)
        self._metrics = IngressMetrics(_member_id(context))
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

    def _coordinators(self) -> tuple[CoordinatorView, ...]:
        """The coordinators, also those that drain."""
        return tuple(
            CoordinatorView(
                one.id,
                one.address,
                one.load.waiting,
                one.load.running,
                one.load.kv_usage,
                one.is_draining,
                one.load.stalled_seconds,
            )
            for one in self._directory.view.of(MemberRole.TARGET)
        )


def _member_id(context: serve.context.ReplicaContext) -> str:
    """The id of this replica, which no other one ever has."""
    return f"{context.deployment.lower()}-{context.replica_id.unique_id}"
