"""The Serve application: which deployments there are, what each is told, and where each sits.

`serve run deploy.app:build_app config=cpu` and `pilotfish serve` build the same one. A worker's
address is asked of Serve whenever a connection is opened, so a revived one is found at its new port.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.core.config import Configuration, load
from cluster.core.errors import DrafterUnavailable, NotReady, PilotfishError, TargetUnavailable
from cluster.ingress.http import create_app
from cluster.wire.clients import GenerationClient, GrpcDrafter, GrpcTarget, Resolve
from deploy.frontend import Frontend
from deploy.machine import local_resources
from deploy.models import resolve_models
from deploy.placement import STRATEGY, Placement, Resources, RolePlacement, plan
from deploy.preflight import check, model_problems
from deploy.settings import Settings, from_arguments, read
from workers.serve.actors import DraftReplica, TargetReplica

APPLICATION = "pilotfish"

_HEALTH_PERIOD_SECONDS = 1.0
_HEALTH_TIMEOUT_SECONDS = 30.0
_CLOSING_SECONDS = 5.0
_MOST_HTTP_CALLS = 10_000
"""Far beyond what the coordinator queues: it says `Overloaded`, Serve never makes a client wait unheard."""


class CoordinatorReplica:
    """Hosts the coordinator and the public gRPC service."""

    async def __init__(self, values: Mapping[str, Any], target: DeploymentHandle, draft: DeploymentHandle) -> None:
        configuration = load(values)
        self._drain_seconds = configuration.server.drain_timeout_seconds
        self._host = configuration.server.grpc_host
        self._frontend = Frontend(
            configuration,
            GrpcTarget(resolver(target, TargetUnavailable)),
            GrpcDrafter(resolver(draft, DrafterUnavailable)),
        )
        self._port = await self._frontend.start()

    async def address(self) -> str:
        """Where the public gRPC service listens."""
        return f"{self._host}:{self._port}"

    async def drain(self) -> None:
        """Take no new requests and let the running ones end."""
        await self._frontend.stop(self._drain_seconds)

    async def check_health(self) -> None:
        """Raise what keeps the coordinator from ever being ready."""
        self._frontend.check_health()

    async def __del__(self) -> None:
        """Serve calls this when the replica ends on purpose."""
        await self._frontend.stop(drain_seconds=0.0)


@serve.ingress()
class IngressReplica:
    """The HTTP door, a gRPC client of the coordinator."""

    async def __init__(self, values: Mapping[str, Any], coordinator: DeploymentHandle) -> None:
        self._limits = load(values).limits
        self._client = GenerationClient(resolver(coordinator, NotReady))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the application once the replica is made."""
        return create_app(self._client, self._limits)


def build_app(config: Configuration | Mapping[str, Any] | str | Path | None = None) -> Application:
    """The application for a configuration, a preset's name or file, or `serve run`'s arguments.

    Finds, fetches or converts the models first. Raises `ConfigurationError`, `ModelLoadError`.
    """
    settings = _settings(config)
    models = resolve_models(settings, report=lambda _: None)
    resources = cluster_resources()
    placement = plan(models.configuration, resources)
    check(model_problems(models.configuration, placement, resources, models.target, models.draft))
    return bind(models.configuration, placement, worker_host=None)


def bind(configuration: Configuration, placement: Placement, worker_host: str | None) -> Application:
    """Bind the deployments. Model paths in `configuration` are local directories.

    Workers listen on `worker_host`, or on their node's address when it is `None`.
    """
    values = configuration.model_dump(mode="json")
    message_bytes = 16 * configuration.limits.max_body_bytes
    target = (
        serve.deployment(TargetReplica)
        .options(
            name="Target",
            ray_actor_options=_actor_options(placement.target, worker_host),
            placement_group_bundles=[bundle.claims() for bundle in placement.target.bundles],
            placement_group_strategy=STRATEGY,
            **_supervision(),
        )
        .bind(values["target"], placement.target.threads, worker_host, message_bytes)
    )
    draft = (
        serve.deployment(DraftReplica)
        .options(name="Draft", ray_actor_options=_actor_options(placement.draft, worker_host), **_supervision())
        .bind(values["draft"], values["target"], placement.draft.threads, worker_host, message_bytes)
    )
    coordinator = (
        serve.deployment(CoordinatorReplica)
        .options(
            name="Coordinator", ray_actor_options=_actor_options(placement.coordinator, worker_host), **_supervision()
        )
        .bind(values, target, draft)
    )
    return (
        serve.deployment(IngressReplica)
        .options(
            name="Ingress",
            ray_actor_options=_actor_options(placement.ingress, worker_host),
            max_ongoing_requests=_MOST_HTTP_CALLS,
            **_supervision(),
        )
        .bind(values, coordinator)
    )


def resolver(handle: DeploymentHandle, unavailable: type[PilotfishError]) -> Resolve:
    """Ask Serve where a deployment's replica listens now."""

    async def resolve() -> str:
        try:
            return str(await handle.address.remote())
        except (RayError, RayServeException) as error:
            raise unavailable(f"{handle.deployment_name} cannot be reached: {error}") from error

    return resolve


def cluster_resources() -> Resources:
    """The largest node of the Ray cluster joined, or this machine when there is none yet."""
    here = local_resources()
    if not ray.is_initialized():
        return here
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
    return Resources(
        cpus=float(largest.get("CPU", 0)),
        gpus=int(largest.get("GPU", 0)),
        memory_bytes=int(largest.get("memory", here.memory_bytes)),
        gpu_memory_bytes=here.gpu_memory_bytes,
    )


def _settings(config: Configuration | Mapping[str, Any] | str | Path | None) -> Settings:
    if isinstance(config, Configuration):
        return Settings(config, read().cache_directory)
    if isinstance(config, Mapping):
        return from_arguments(config)
    return read(None if config is None else str(config))


def _actor_options(role: RolePlacement, worker_host: str | None) -> dict[str, Any]:
    """The first bundle is the replica's own; the others are for its followers."""
    claims = role.bundles[0].claims()
    options: dict[str, Any] = {"num_cpus": claims["CPU"], "num_gpus": claims.get("GPU", 0)}
    if worker_host == "127.0.0.1" and len(role.bundles) > 1 and sys.platform == "linux":
        # The ranks' own traffic stays on loopback too.
        options["runtime_env"] = {"env_vars": {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}}
    return options


def _supervision() -> dict[str, Any]:
    """A dead replica is noticed within a second or two; a constructor's failure is told, not repeated."""
    return {
        "num_replicas": 1,
        "health_check_period_s": _HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": _HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": _CLOSING_SECONDS,
        "max_constructor_retry_count": 1,
    }
