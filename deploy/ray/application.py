"""The Serve application: its deployments, their arguments and their placement.

`serve run deploy.ray.application:build_app config=cpu` and `pilotfish serve` build the same application.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from cluster.core.config.sections import Configuration
from cluster.wire.peer_access import PeerAccess
from deploy.implied_settings import with_implied_settings
from deploy.machine import local_resources
from deploy.models import resolve_models
from deploy.placement import STRATEGY, Placement, Resources, RolePlacement, plan
from deploy.preflight import model_problems, raise_problems
from deploy.ray.autoscaling import number_of_replicas
from deploy.ray.deployments import DraftReplica, IngressReplica, TargetReplica
from deploy.ray.start_ray import check_ray_authentication
from deploy.settings import Settings, load_settings, settings_from_arguments

APPLICATION = "pilotfish"

_HEALTH_PERIOD_SECONDS = 1.0
_HEALTH_TIMEOUT_SECONDS = 30.0
_CLOSING_SECONDS = 15.0
"""Time to stop after a replica has drained, in seconds. Then Serve kills it."""
_NODE_CLAIM = 0.001
_MOST_HTTP_CALLS = 10_000
"""Far above the coordinator's queue limit, so that the coordinator rejects requests (`Overloaded`), not Serve."""


def build_app(config: Configuration | Mapping[str, Any] | str | Path | None = None) -> Application:
    """Build the application for a configuration, a preset or file, or the arguments of `serve run`.

    Finds, fetches or converts the models first. Raises `ConfigurationError`, `ModelLoadError`.
    """
    settings = _settings(config)
    models = resolve_models(settings.configuration, settings.cache_directory, report=lambda _: None)
    if ray.is_initialized() and models.configuration.cluster.ray_auth == "token":
        check_ray_authentication()
    resources = cluster_resources()
    placement = plan(models.configuration, resources)
    raise_problems(model_problems(models.configuration, placement, resources, models.target, models.draft))
    return bind(models.configuration, placement, worker_host=None, access=settings.access)


def bind(
    configuration: Configuration, placement: Placement, worker_host: str | None, access: PeerAccess
) -> Application:
    """Bind the deployments. Model paths in `configuration` are local directories.

    Processes listen for each other on `worker_host`, or on their node's address if it is `None`. They find each other
    in the directory; the ingress is bound to the other deployments only so that all are deployed. Internal
    services demand `access`.
    """
    configuration = with_implied_settings(configuration)
    # A process that claims no GPU may still see all GPUs, so its device is set explicitly.
    target = configuration.target.model_copy(update={"device": placement.target.device})
    draft = configuration.draft.with_weights(device=placement.draft.device)
    values = configuration.model_copy(update={"target": target, "draft": draft}).model_dump(mode="json")
    version = _version(values)
    targets = serve.deployment(
        name="Target",
        placement_group_bundles=[
            bundle.claims() | node_claim(target.node_resource)
            for bundle in (*placement.coordinator.bundles, *placement.target.bundles)
        ],
        placement_group_strategy=STRATEGY,
        ray_actor_options=actor_options(placement.coordinator),
        **_supervision(configuration),
        **number_of_replicas(target.replicas, target.autoscaling),
    )(TargetReplica).bind(values, version, placement.target.threads, environment(placement.target), worker_host, access)
    others = [targets]
    if not draft.is_colocated:
        # A drafter reads settings of the target, such as its weights, but computes on its own device.
        read = values | {"target": values["target"] | {"device": placement.draft.device}}
        drafters = serve.deployment(
            name="Draft",
            ray_actor_options=actor_options(placement.draft) | {"resources": node_claim(draft.node_resource)},
            num_replicas=draft.replicas,
            **_supervision(configuration),
        )(DraftReplica)
        others.append(drafters.bind(read, version, placement.draft.threads, worker_host, access))
    return serve.deployment(
        name="Ingress",
        max_ongoing_requests=_MOST_HTTP_CALLS,
        ray_actor_options=actor_options(placement.ingress),
        num_replicas=configuration.server.ingress_replicas,
        **_supervision(configuration),
    )(IngressReplica).bind(values, access, *others)


def _version(values: Mapping[str, Any]) -> str:
    """A name of what target and drafters must have in common, to serve each other."""
    counts = ("replicas", "autoscaling", "threads", "device", "node_resource")
    common = {key: {k: v for k, v in values[key].items() if k not in counts} for key in ("target", "draft")}
    return sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:16]


def cluster_resources() -> Resources:
    """The resources of the largest node of the Ray cluster, or of this machine if Ray is not initialized."""
    here = local_resources()
    if not ray.is_initialized():
        return here
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    largest = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
    return Resources(
        cpus=float(largest.get("CPU", 0)),
        gpus=int(largest.get("GPU", 0)),
        memory_bytes=int(largest.get("memory", here.memory_bytes)),
        gpu_memory_bytes=here.gpu_memory_bytes,
    )


def _settings(config: Configuration | Mapping[str, Any] | str | Path | None) -> Settings:
    if isinstance(config, Configuration):
        return Settings(config, load_settings().cache_directory)
    if isinstance(config, Mapping):
        return settings_from_arguments(config)
    return load_settings(None if config is None else str(config))


def actor_options(role: RolePlacement) -> dict[str, Any]:
    """Ray's options for a replica that claims the role's first bundle."""
    claims = role.bundles[0].claims()
    options: dict[str, Any] = {"num_cpus": claims["CPU"], "num_gpus": claims.get("GPU", 0)}
    variables = environment(role)
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    return options


def node_claim(resource: str | None) -> dict[str, float]:
    """A tiny part of a custom resource: a process that claims it runs on a node that has the resource."""
    return {} if resource is None else {resource: _NODE_CLAIM}


def environment(role: RolePlacement) -> dict[str, str]:
    """Environment variables of the role's processes."""
    variables: dict[str, str] = {}
    if role.device == "cpu" and role.role in ("target", "draft"):
        # Target and drafters share cores: threads that spin while they wait would slow each other down.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
        # torch.set_num_threads does not reach threads that start later, and Ray sets one OpenMP thread for them.
        variables["OMP_NUM_THREADS"] = str(role.threads)
    return variables


def _supervision(configuration: Configuration) -> dict[str, Any]:
    """Serve's options for supervision. It notices a dead replica in two seconds and never retries a constructor."""
    return {
        "user_config": {"log_level": configuration.log_level},  # Serve passes it to `reconfigure`
        "health_check_period_s": _HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": _HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": configuration.server.drain_timeout_seconds + _CLOSING_SECONDS,
        "max_constructor_retry_count": 1,
    }
