"""The Serve deployment of a target: a coordinator and its ranks. Ray restarts it; gRPC carries every token.

Each deployment has a module of its own, so that a replica that takes the place of a killed one imports no other's
libraries. A replica that serves does not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve

from cluster.core.config.target_section import answer_version
from cluster.core.membership import Member, MemberRole, View
from cluster.wire.address import join_host_port
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.peer_access import PeerAccess
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from deploy.ray.autoscaling import reported
from deploy.ray.directory import DirectoryClient, member_id
from deploy.ray.drafter_follower import DrafterFollower
from deploy.ray.node_models import find_on_nodes, with_local_models
from workers.serve.configuration import load_configuration
from workers.serve.logs import set_logging
from workers.serve.node import node_address
from workers.serve.rank_actors import RankActors, rank_kinds
from workers.serve.rank_placement import RankPlacement, has_spare_ranks
from workers.serve.rank_supervisor import RankSupervisor


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
        self._has_drafters = configuration.draft.uses_drafters
        self._host = worker_host or node_address()
        target = configuration.target
        kinds = rank_kinds(target.tensor_parallel)
        # Where `serve` started Ray, a `WaitingRank` of its own serves this replica and those that take its place.
        is_local = worker_host is not None
        placement = RankPlacement(
            kinds,
            environment,
            standby=has_spare_ranks(target, is_local=is_local),
            application=context.app_name if is_local and target.device == "cpu" else "",
            spans_nodes=spans_nodes,
        )
        self._ranks = RankSupervisor(lambda: RankActors(configuration, threads, self._host, placement, access))
        step_timeout = configuration.target.step_timeout_seconds
        lease_seconds = configuration.cluster.lease_seconds
        self._target = GrpcTarget(self._ranks.address, access, step_timeout, lease_seconds)
        self._server = CoordinatorServer(configuration, self._target, internal_host=self._host, access=access)
        self._drafters = DrafterFollower(
            self._server.coordinator,
            version,
            lambda address: GrpcDrafter(fixed_address(address), access, lease_seconds),
        )
        name = f"{answer_version(load_configuration(values).target)}:{member_id(context)}"
        self._member = Member(MemberRole.TARGET, name, "", version)
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
