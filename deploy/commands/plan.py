"""`pilotfish plan`: print where every role would run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, shorten
from cluster.wire.address import join_host_port
from deploy.commands.options import ConfigOption, SetOption
from deploy.fitting import fit
from deploy.placement import Placement, Resources, plan
from deploy.roofline import describe_prompt_tokens, model_values
from deploy.settings import Settings, load_settings
from deploy.terminal import output, write_json
from workers.model.head_counts import describe_shared_heads, stated_counts

if TYPE_CHECKING:
    from deploy.preflight import Problem

_MOST_NODES = 4096
"""Nodes that a plan is made for."""
NodeOption = Annotated[
    list[str] | None,
    typer.Option("--node", help="A node to plan for instead, as in 2*cpus=96,gpus=8,memory_gib=1000; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan_command(
    config: ConfigOption = None, assignments: SetOption = None, node: NodeOption = None, as_json: JsonOption = False
) -> None:
    """Print the placement that `serve` would use on this machine or its Ray cluster. Start nothing.

    The exit status is 1 if something is missing. Models are looked for where the plan is for this machine.
    """
    settings = load_settings(config, assignments or ())
    nodes = parse_nodes(node) if node else _nodes(settings)
    # Importing it takes seconds, so the settings are checked first.
    from deploy.preflight import capacity_problems

    placement = plan(settings.configuration, nodes)
    problems = [*capacity_problems(placement, nodes), *_head_problems(settings.configuration)]
    if not node and settings.ray_address is None:
        problems += _model_problems(settings)
    if as_json:
        write_json(description(settings.configuration, placement, nodes, problems))
    else:
        output.print(placement_table(settings.configuration, placement, nodes))
        for note in notes(settings.configuration, placement):
            output.print(note, markup=False)
        for problem in problems:
            output.print(f"would not start: {problem}", markup=False)
    if problems:
        raise typer.Exit(1)


def _head_problems(configuration: Configuration) -> list[Problem]:
    """Why the ranks cannot divide the heads of a target that is on this machine."""
    from deploy.preflight import head_problems

    target = configuration.target
    directory = Path(expanduser(target.path))
    return list(head_problems(directory, target.tensor_parallel)) if model_values(configuration) else []


def _model_problems(settings: Settings) -> Iterator[Problem]:
    """Problems with models that should be on this machine. `serve` fetches those of a hub itself."""
    from deploy.doctor.models import model_findings
    from deploy.preflight import Problem

    for finding in model_findings(settings.configuration, settings.cache_directory):
        if finding.remedy is not None:
            yield Problem(finding.subject, "a model that can be loaded", finding.found, finding.remedy)


def _nodes(settings: Settings) -> tuple[Resources, ...]:
    """The nodes of the Ray cluster that the settings name, or this machine."""
    if settings.ray_address is None:
        from deploy.machine import local_resources

        return (local_resources(),)
    from deploy.ray.nodes import joined_nodes

    return joined_nodes(settings.ray_address, demands_token=settings.configuration.cluster.ray_auth == "token")


def parse_nodes(values: Sequence[str]) -> tuple[Resources, ...]:
    """Nodes from `[COUNT*]key=value,…`. Raises `ConfigurationError`."""
    nodes: list[Resources] = []
    for value in values:
        count, _, amounts = value.rpartition("*")
        try:
            pairs = [pair.split("=") for pair in amounts.split(",")]
            numbers = {key: float(amount) for key, amount in pairs}
            number = int(count or 1)
            if len(numbers) < len(pairs) or not 1 <= number <= _MOST_NODES - len(nodes):
                raise ValueError
            if not all(0 <= amount < math.inf for amount in numbers.values()) or numbers.get("gpus", 0) % 1:
                raise ValueError
            for _ in range(number):
                nodes.append(_node(f"node {len(nodes) + 1}", **numbers))
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"--node {shorten(value)[1:-1]}: needed [COUNT*]cpus=…,gpus=…,memory_gib=…,gpu_memory_gib=… with each "
                "key once, numbers of at least 0, a whole number of GPUs, and COUNT of at least 1; all nodes are at "
                f"most {_MOST_NODES}"
            ) from None
    return tuple(nodes)


def _node(
    name: str, cpus: float, gpus: float = 0, memory_gib: float = float(1 << 20), gpu_memory_gib: float = 0
) -> Resources:
    return Resources(cpus, int(gpus), int(memory_gib * 2**30), int(gpu_memory_gib * 2**30), name)


def notes(configuration: Configuration, placement: Placement) -> list[str]:
    """What the table does not say: how ranks share KV heads; on a GPU, its CUDA graphs and how many prompt tokens a
    step takes beside decoding; and where drafts without a process are made."""
    draft, found = configuration.draft, list[str]()
    if placement.target.device == "cuda" and configuration.target.compile != "off":
        from workers.forward.graph_sizes import describe_graphs

        found.append(describe_graphs())
    device = placement.target.device if placement.drafts_on_target else placement.draft.device
    if draft.is_enabled and device == "cuda" and configuration.target.compile != "off":
        from workers.draft.registry import describe_graphs as describe_drafting_graphs

        found += describe_drafting_graphs(draft)
    if placement.target.device == "cuda":
        found.append(describe_prompt_tokens(configuration))
    ranks = configuration.target.tensor_parallel
    shared = describe_shared_heads(*stated_counts(model_values(configuration), ranks), ranks)
    found += [] if shared is None else [shared]
    if draft.weights is None or not placement.drafts_on_target:
        return found
    on_gpu = placement.draft.device == "cuda"
    place = "on a GPU of the target (rank 0)" if on_gpu else "in the target's process (rank 0)"
    if draft.placement == "target":
        reason = "draft.placement is target"
    else:
        reason = "no GPU is left for it" if on_gpu else "it takes less time there"
    return [
        *found,
        f"the draft {draft.weights.path} drafts {place}: {reason}; its KV pool, draft.{draft.weights_method}.kv, is "
        "taken before the target's is sized",
    ]


def description(
    configuration: Configuration, placement: Placement, nodes: Sequence[Resources], problems: Sequence[Problem]
) -> dict[str, Any]:
    """The placement as JSON values: nodes, processes, notes and problems. A group without a place has no node."""
    return {
        "nodes": [asdict(node) for node in nodes],
        "processes": [row | {"what": _descriptions(configuration)[row["role"]]} for row in _rows(placement, nodes)],
        "notes": notes(configuration, placement),
        "problems": [asdict(problem) for problem in problems],
    }


def placement_table(configuration: Configuration, placement: Placement, nodes: Sequence[Resources]) -> Table:
    """The placement as a table: one row per process."""
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    several = f" of {len(nodes)} nodes" if len(nodes) > 1 else ""
    table = Table(
        title=f"Placement on {cpus:g} cores and {gpus} GPUs{several}",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    columns = ("role", "process", *(("node",) if several else ()), "device", "CPU", "GPU", "threads", "what")
    for heading in columns:
        numeric = heading in ("CPU", "GPU", "threads")
        is_short = heading not in ("node", "what")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=is_short)
    what = _descriptions(configuration)
    for row in _rows(placement, nodes):
        named = [f"replica {row['replica'] + 1}"] if _has_several(placement, row["role"]) else []
        named += [f"rank {row['rank']} of {len(placement.target.bundles)}"] if row["rank"] is not None else []
        process = ", ".join(named) or "replica"
        cells = {"role": row["role"], "process": process, "node": row["node"] or "none", "device": row["device"]}
        cells |= {"CPU": f"{row['cpus']:g}", "GPU": str(row["gpus"]), "threads": str(row["threads"])}
        cells["what"] = what[row["role"]]
        table.add_row(*(cells[column] for column in columns))
    return table


def _has_several(placement: Placement, name: str) -> bool:
    """Whether a role has several replicas."""
    return next(role.replicas for role in placement.roles if role.role == name) > 1


def _rows(placement: Placement, nodes: Sequence[Resources]) -> list[dict[str, Any]]:
    """One entry per process: its role, replica, rank, node, device and claims."""
    found = fit(placement, nodes)
    rows: list[dict[str, Any]] = []
    for role in placement.roles:
        group = "target" if role.role == "coordinator" else role.role
        first = len(placement.coordinator.bundles) if role.role == "target" else 0  # a target's begin with those
        for replica in range(role.replicas):
            for rank, bundle in enumerate(role.bundles):
                rows.append(
                    {
                        "role": role.role,
                        "replica": replica,
                        "rank": rank if role.role == "target" else None,
                        "node": found.node_of(group, replica, first + rank),
                        "device": role.device,
                        "cpus": bundle.cpus,
                        "gpus": bundle.gpus,
                        "threads": role.threads,
                    }
                )
    return rows


def _descriptions(configuration: Configuration) -> dict[str, str]:
    """The model, method or address of each role, by role."""
    target, draft, server = configuration.target, configuration.draft, configuration.server
    return {
        "target": f"{target.path} ({target.dtype})",
        "draft": draft.name + (f": {draft.weights.path}" if draft.weights is not None else ""),
        "coordinator": f"gRPC {join_host_port(server.grpc_host, server.grpc_port)}",
        "ingress": f"HTTP {join_host_port(server.http_host, server.http_port)}",
    }
