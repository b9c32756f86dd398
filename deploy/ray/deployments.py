"""The deployments of the control plane. Kept apart from the data plane's: their processes need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.core.errors import DrafterUnavailable, NotReady, PilotfishError, TargetUnavailable
from cluster.ingress.http import create_app
from cluster.wire.address import join_host_port
from cluster.wire.connection import Resolve
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from workers.serve.actors import node_address
from workers.serve.configuration import load_configuration
from workers.serve.worker_server import set_log_level

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, never bound to


class CoordinatorReplica:
    """Hosts the coordinator and the public gRPC service."""

    def __init__(
        self, values: Mapping[str, Any], target: DeploymentHandle[Any], *drafts: DeploymentHandle[Any]
    ) -> None:
        configuration = load_configuration(values)
        self._drain_seconds = configuration.server.drain_timeout_seconds
        self._host = configuration.server.grpc_host
        self._target = GrpcTarget(
            resolver(target, TargetUnavailable), step_timeout_seconds=configuration.target.step_timeout_seconds
        )
        self._drafters = [GrpcDrafter(resolver(draft, DrafterUnavailable)) for draft in drafts]
        self._server = CoordinatorServer(configuration, self._target, self._drafters)
        self._port = 0

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Serve calls this on the event loop of requests, before it counts the replica as up."""
        set_log_level(user_config)
        if not self._port:
            self._port = await self._server.start()

    async def address(self) -> str:
        """Where the public gRPC service listens."""
        host = node_address() if self._host in _EVERYWHERE else self._host
        return join_host_port(host, self._port)

    async def drain(self) -> None:
        """Take no new requests and let the running ones end."""
        await self._server.stop(self._drain_seconds)

    async def check_health(self) -> None:
        """Raise what keeps the coordinator from ever being ready."""
        self._server.check_health()

    async def __del__(self) -> None:
        """Serve calls this when the replica ends on purpose."""
        await self._server.stop(drain_seconds=0.0)
        await self._target.close()
        for drafter in self._drafters:
            await drafter.close()


@serve.ingress()
class IngressReplica:
    """The HTTP door, a gRPC client of the coordinator."""

    def __init__(self, values: Mapping[str, Any], coordinator: DeploymentHandle[Any]) -> None:
        configuration = load_configuration(values)
        set_log_level({"log_level": configuration.log_level})
        self._limits = configuration.limits
        self._client = GenerationClient(resolver(coordinator, NotReady))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the application once the replica is made."""
        return create_app(self._client, self._limits)


def resolver(handle: DeploymentHandle[Any], unavailable: type[PilotfishError]) -> Resolve:
    """Ask Serve where a deployment's replica listens now."""

    async def resolve() -> str:
        try:
            return str(await handle.address.remote())
        except (RayError, RayServeException) as error:
            raise unavailable(f"{handle.deployment_name} cannot be reached: {error}") from error

    return resolve
