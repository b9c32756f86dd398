"""Models on the nodes of a Ray cluster: each node resolves paths, hub ids and packaged names by itself.

Resolving may convert weights, so a short task with torch does it, and processes of the control plane stay without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.fitting import fit
from deploy.models import resolve_models
from deploy.placement import Placement, Resources, plan
from deploy.preflight import model_problems
from deploy.settings import cache_directory
from workers.draft.registry import METHODS
from workers.serve.configuration import load_configuration


def with_local_models(configuration: Configuration) -> Configuration:
    """The configuration with the models' directories on this node. Blocks while they are fetched or converted.

    Raises `ModelLoadError`.
    """
    values = configuration.model_dump(mode="json")
    return load_configuration(_on_node(ray.get_runtime_context().get_node_id(), _resolve, values))


def find_on_nodes(configuration: Configuration, local: Configuration) -> None:
    """Let each node of the current placement group find the target, which `local` has found on this one.

    Raises `ConfigurationError` where a node has it in another directory, since all ranks of a target read the same.
    """
    group = ray.util.get_current_placement_group()
    nodes: Mapping[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    for node in sorted(set(nodes.values()) - {ray.get_runtime_context().get_node_id()}):
        found = load_configuration(_on_node(node, _resolve, configuration.model_dump(mode="json")))
        if found.target.path != local.target.path:
            raise ConfigurationError(
                f"target.span_nodes: the target is at {local.target.path!r}, but on node {node} at "
                f"{found.target.path!r}; it must be at the same path on all nodes of a target"
            )


def with_local_drafts(configuration: Configuration) -> Configuration:
    """As `with_local_models` if the drafting methods read any model's files; else the configuration itself."""
    draft = configuration.draft
    reads = any(METHODS.get(method).settings.reads_target_files for method in draft.selected("method"))
    return with_local_models(configuration) if draft.weights is not None or draft.modules or reads else configuration


def check_models(configuration: Configuration, placement: Placement, nodes: Sequence[Resources]) -> None:
    """Check the models on the node of a target, where they are found, fetched or converted.

    Raises `ConfigurationError` and `ModelLoadError`. Without a Ray cluster, or without a node for a target, the models
    are checked when they are loaded.
    """
    seats = [seat for seat in fit(placement, nodes).seats if seat.group.role == "target" and seat.node.id]
    if not ray.is_initialized() or not seats:
        return
    problems = _on_node(seats[0].node.id, _check, configuration.model_dump(mode="json"), list(nodes))
    if problems:
        raise ConfigurationError("\n".join(problems))


def on_planned_device(configuration: Configuration, nodes: Sequence[Resources]) -> Configuration:
    """The configuration with the device that the target is planned on, which a process without a GPU does not see.

    `target.quantization: auto` depends on it.
    """
    device = plan(configuration, nodes).target.device
    target = configuration.target.model_copy(update={"device": device})
    return configuration.model_copy(update={"target": target})


def _on_node(node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a task on a node. Raises the error that the function raises."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        return ray.get(task.remote(*arguments))
    except RayTaskError as error:
        raise error.cause from None


def _resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    models = resolve_models(load_configuration(values), cache_directory(), report=lambda _: None)
    return models.configuration.model_dump(mode="json")


def _check(values: Mapping[str, Any], nodes: Sequence[Resources]) -> list[str]:
    configuration = on_planned_device(load_configuration(values), nodes)
    models = resolve_models(configuration, cache_directory(), report=lambda _: None)
    found, placement = models.configuration, plan(models.configuration, nodes)
    return [str(problem) for problem in model_problems(found, placement, nodes, models.target, models.draft)]
