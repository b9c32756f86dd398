"""The Serve application: its deployments, their arguments and their placement.

`pilotfish serve`, `serve run deploy.ray.application:build_app config=cpu`, a configuration file with this import path
and `args`, and `serve build deploy.ray.application:app` build the same application.
"""

# Serve reads the type of the argument of `build_app`, so annotations of this module are evaluated.
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from cluster.core.config.base import shared_settings
from cluster.core.config.sections import Configuration
from cluster.ingress.access.api_keys import ApiKey
from cluster.wire.peer_access import PeerAccess
from deploy.implied_settings import with_implied_settings
from deploy.models import with_module_directories, with_moved_fusion, with_served_name
from deploy.placement import Placement, Resources, RolePlacement, plan, strategy
from deploy.ray.autoscaling import number_of_replicas
from deploy.ray.draft_replica import DraftReplica
from deploy.ray.ingress_replica import IngressReplica
from deploy.ray.node_models import check_models
from deploy.ray.nodes import cluster_nodes
from deploy.ray.running_serve import has_replicas
from deploy.ray.start_ray import check_ray_authentication
from deploy.ray.target_replica import TargetReplica
from deploy.settings import settings_from_arguments

_HEALTH_PERIOD_SECONDS = 0.5
_HEALTH_TIMEOUT_SECONDS = 10.0
"""Longest time of a health check. Serve kills and replaces a replica after three failed ones, so a frozen one too."""
_CLOSING_SECONDS = 15.0
"""Time to stop after a replica has drained, in seconds. Then Serve kills it."""
_NODE_CLAIM = 0.001
_Common = tuple[str, str | None, PeerAccess]
"""What targets and drafters are bound to alike: the version of the settings, the host they listen on, the access."""
_UNKNOWN_BYTES = 1 << 60
"""The memory of a node where nobody knows what will be free. What is loaded there checks it."""
_MOST_HTTP_CALLS = 10_000
"""Far above the coordinator's queue limit, so that the coordinator rejects requests (`Overloaded`), not Serve."""


class ExpectedNodes(BaseModel):
    """Equal nodes that the Ray cluster will have."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    cpus: Annotated[float, Field(ge=0)]
    """Cores of each node."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each node."""
    resource: str
    """The custom Ray resource of the nodes."""


class ApplicationArguments(BaseModel):
    """The arguments of `build_app`: a preset or file, and settings with dotted or nested keys on top of it."""

    model_config = ConfigDict(extra="allow")

    config: str | None = None
    """A preset or a file on the node that builds the application; unset: the environment's or the default preset."""
    nodes: tuple[ExpectedNodes, ...] = ()
    """Nodes for which the processes are planned; empty: those that the Ray cluster has when the application is built.

    KubeRay has it built as soon as the head is there, whose pod runs no replica. The other pods come later.
    """

    def resources(self) -> tuple[Resources, ...]:
        """The nodes, one by one."""
        return tuple(
            Resources(one.cpus, one.gpus, _UNKNOWN_BYTES, node=f"{one.resource} {number + 1}", custom=(one.resource,))
            for one in self.nodes
            for number in range(one.count)
        )


def build_app(arguments: ApplicationArguments) -> Application:
    """Build the application. In a Ray cluster, check the models on a node first, if it has one for a target.

    Models are found, fetched or converted on the nodes that load them. Raises `ConfigurationError`, `ModelLoadError`.
    """
    settings = settings_from_arguments(arguments.model_dump(exclude={"nodes"}))
    configuration = with_served_name(settings.configuration)
    if ray.is_initialized() and configuration.cluster.ray_auth == "token":
        check_ray_authentication()
    nodes = cluster_nodes()
    placement = plan(configuration, arguments.resources() or nodes)
    if has_replicas():
        # An application that is deployed again gets the memory of its own replicas, which is not free yet.
        nodes = tuple(replace(node, memory_bytes=_UNKNOWN_BYTES, gpu_memory_bytes=0) for node in nodes)
    check_models(configuration, placement, nodes)
    return bind(configuration, placement, worker_host=None, access=settings.access, api_keys=settings.api_keys)


def __getattr__(name: str) -> Application:
    """`app` is the application of the environment's configuration. `serve build` needs an application, no function."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_app(ApplicationArguments())


def bind(
    configuration: Configuration,
    placement: Placement,
    worker_host: str | None,
    access: PeerAccess,
    api_keys: Sequence[ApiKey] = (),
) -> Application:
    """Bind the deployments. With a `worker_host`, model paths in `configuration` are local directories.

    Otherwise processes with a model find it on their node.

    Processes listen for each other on `worker_host`, or on their node's address if it is `None`. They find each other
    in the directory; the ingress is bound to the other deployments only so that all are deployed. Internal
    services demand `access`, the public APIs one of `api_keys` or of the configured file.
    """
    settled = _on_devices(configuration, placement)
    values = settled.model_dump(mode="json")
    common = (_version(settled), worker_host, access)
    others = [_bind_targets(settled, placement, values, common)]
    if settled.draft.uses_drafters:
        others.append(_bind_drafters(settled, placement, values, common))
    return serve.deployment(
        name="Ingress",
        max_ongoing_requests=_MOST_HTTP_CALLS,
        ray_actor_options=actor_options(placement.ingress)
        | {"resources": node_claim(settled.server.ingress_node_resource)},
        num_replicas=settled.server.ingress_replicas,
        **_supervision(settled, worker_host),
    )(IngressReplica).bind(values, access, tuple(api_keys), *others)


def _on_devices(configuration: Configuration, placement: Placement) -> Configuration:
    """The configuration with implied settings, and with the device of each role set.

    A process that claims no GPU may still see all GPUs. Paths of drafting modules stay as they are named.
    """
    named = configuration.draft
    if named.is_enabled and placement.drafts_on_target:
        named = named.model_copy(update={"placement": "target"})
    found = configuration.model_copy(update={"draft": with_module_directories(named)})
    implied = with_implied_settings(found)
    target = implied.target.model_copy(update={"device": placement.target.device})
    draft = implied.draft.with_weights(device=placement.draft.device)
    for method, section in named.modules.items():
        draft = draft.with_module(method, path=section.path)
    implied = implied.model_copy(update={"target": target})
    return with_moved_fusion(implied, found.draft, draft)


def _bind_targets(
    configuration: Configuration, placement: Placement, values: Mapping[str, Any], common: _Common
) -> Application:
    """The deployment of target replicas: a coordinator and its ranks on one node each."""
    target = configuration.target
    version, worker_host, access = common
    return serve.deployment(
        name="Target",
        placement_group_bundles=[
            bundle.claims() | node_claim(target.node_resource)
            for bundle in (*placement.coordinator.bundles, *placement.target.bundles)
        ],
        placement_group_strategy=strategy(spans_nodes=placement.target.spans_nodes),
        ray_actor_options=actor_options(placement.coordinator),
        **_supervision(configuration, worker_host),
        **number_of_replicas(target.replicas, target.autoscaling),
    )(TargetReplica).bind(values, version, placement.target.threads, placement.target.environment, worker_host, access)


def _bind_drafters(
    configuration: Configuration, placement: Placement, values: Mapping[str, Any], common: _Common
) -> Application:
    """The deployment of drafters. One reads settings of the target, such as its weights, and has its own device."""
    read = {**values, "target": values["target"] | {"device": placement.draft.device}}
    version, worker_host, access = common
    return serve.deployment(
        name="Draft",
        ray_actor_options=actor_options(placement.draft) | {"resources": node_claim(configuration.draft.node_resource)},
        num_replicas=configuration.draft.replicas,
        **_supervision(configuration, worker_host),
    )(DraftReplica).bind(read, version, placement.draft.threads, worker_host, access)


def _version(configuration: Configuration) -> str:
    """A name of what target and drafters must have in common, to serve each other."""
    common = {"target": shared_settings(configuration.target), "draft": shared_settings(configuration.draft)}
    return sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:16]


def actor_options(role: RolePlacement) -> dict[str, Any]:
    """Ray's options for a replica that claims the role's first bundle."""
    claims = role.bundles[0].claims()
    options: dict[str, Any] = {"num_cpus": claims["CPU"], "num_gpus": claims.get("GPU", 0)}
    if role.environment:
        options["runtime_env"] = {"env_vars": role.environment}
    return options


def node_claim(resource: str | None) -> dict[str, float]:
    """A tiny part of a custom resource: a process that claims it runs on a node that has the resource."""
    return {} if resource is None else {resource: _NODE_CLAIM}


def _supervision(configuration: Configuration, worker_host: str | None) -> dict[str, Any]:
    """Serve's options for supervision. It notices a dead replica in two seconds.

    A deployment none of whose replicas has started yet fails for good after as many failed starts as the option says.
    In a Ray cluster, a start may fail for what passes: a node ends while it loads, a hub does not answer, the memory of
    a GPU is not free yet. Serve's own default stays there: three starts for each replica, 20 at most. A node or a GPU
    that is not there is no failed start: Serve waits for it. Where `pilotfish serve` starts Ray, the first failure ends
    the command with its reason, and whoever started it decides whether it starts again.
    """
    options: dict[str, Any] = {
        "user_config": {  # Serve passes it to `reconfigure`
            "log_level": configuration.log_level,
            "log_format": configuration.server.log_format,
        },
        "health_check_period_s": _HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": _HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": configuration.server.drain_timeout_seconds + _CLOSING_SECONDS,
    }
    return options if worker_host is None else options | {"max_constructor_retry_count": 1}
