"""The Serve deployments of the control plane. Their processes do not import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.core.errors import DrafterUnavailable, NotReady, PilotfishError
from cluster.ingress.http import create_app
from cluster.wire.address import join_host_port
from cluster.wire.connection import Resolve
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from workers.serve.configuration import load_configuration
from workers.serve.node import node_address
from workers.serve.rank_actors import RankActors
from workers.serve.rank_supervisor import RankSupervisor
from workers.serve.worker_server import set_log_level

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, never bound to


class TargetReplica:
    """The Serve replica of a target: the coordinator with its gRPC API, in this process, and the target's ranks.

    The ranks are actors in the further bundles of the replica's placement group. This process starts, watches and
    restarts them, and keeps the streams of its clients while they restart. It owns its target alone.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        threads: int,
        environment: Mapping[str, str],
        worker_host: str | None,
        *drafts: DeploymentHandle[Any],
    ) -> None:
        configuration = load_configuration(values)
        self._drain_seconds = configuration.server.drain_timeout_seconds
        self._host = configuration.server.grpc_host
        rank_host = worker_host or node_address()
        self._ranks = RankSupervisor(lambda: RankActors(configuration, threads, rank_host, environment))
        self._target = GrpcTarget(self._ranks.address, step_timeout_seconds=configuration.target.step_timeout_seconds)
        self._drafters = [GrpcDrafter(resolver(draft, DrafterUnavailable)) for draft in drafts]
        self._server = CoordinatorServer(configuration, self._target, self._drafters)
        self._port = 0

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start on the first call. Serve calls this on the request event loop before the replica is healthy."""
        set_log_level(user_config)
        if not self._port:
            _, self._port = await asyncio.gather(self._ranks.start(), self._server.start())

    async def address(self) -> str:
        """The address of the gRPC API."""
        host = node_address() if self._host in _EVERYWHERE else self._host
        return join_host_port(host, self._port)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        await self._server.stop(self._drain_seconds)

    async def check_health(self) -> None:
        """Raise an error if this replica cannot serve any more, so that Serve replaces it with all its ranks."""
        self._ranks.check_health()
        self._server.check_health()

    async def __del__(self) -> None:
        """Stop. Serve calls and awaits this when it stops the replica."""
        await self._server.stop(drain_seconds=0.0)
        await self._target.close()
        for drafter in self._drafters:
            await drafter.close()
        await self._ranks.stop()


@serve.ingress()
class IngressReplica:
    """The Serve replica that runs the HTTP API. It is a gRPC client of the coordinator."""

    def __init__(self, values: Mapping[str, Any], target: DeploymentHandle[Any]) -> None:
        configuration = load_configuration(values)
        set_log_level({"log_level": configuration.log_level})
        self._limits = configuration.limits
        self._client = GenerationClient(resolver(target, NotReady))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The ASGI application. Serve asks for it once the replica is constructed."""
        return create_app(self._client, self._limits, adds_request_id=False)  # Serve's proxy adds the header


def resolver(handle: DeploymentHandle[Any], unavailable: type[PilotfishError]) -> Resolve:
    """A resolver that asks Serve for the current address of a deployment's replica."""

    async def resolve() -> str:
        try:
            return str(await handle.address.remote())
        except (RayError, RayServeException) as error:
            raise unavailable(f"{handle.deployment_name} cannot be reached: {error}") from error

    return resolve
