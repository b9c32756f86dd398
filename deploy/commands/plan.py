"""`pilotfish plan`: print where every role would run."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.table import Table

from cluster.core.config.sections import Configuration
from cluster.wire.address import join_host_port
from deploy.commands.options import ConfigOption, SetOption
from deploy.placement import Placement, Resources, plan
from deploy.settings import load_settings
from deploy.terminal import output


def plan_command(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Print the placement that `serve` would use on this machine. Start nothing."""
    configuration = load_settings(config, assignments or ()).configuration
    # Importing torch takes seconds, so the settings are checked first.
    from deploy.machine import local_resources
    from deploy.preflight import capacity_problems

    resources = local_resources()
    placement = plan(configuration, resources)
    output.print(placement_table(configuration, placement, resources))
    for problem in capacity_problems(placement, resources):
        output.print(f"would not start: {problem}", markup=False)


def placement_table(configuration: Configuration, placement: Placement, resources: Resources) -> Table:
    """The placement as a table: one row per process."""
    table = Table(
        title=f"Placement on {resources.cpus:g} cores and {resources.gpus} GPUs", title_justify="left", box=SIMPLE
    )
    for heading in ("role", "process", "device", "CPU", "GPU", "threads", "what"):
        numeric = heading in ("CPU", "GPU", "threads")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    what = _descriptions(configuration)
    for role in placement.roles:
        for rank, bundle in enumerate(role.bundles):
            process = f"rank {rank} of {len(role.bundles)}" if role.role == "target" else "replica"
            claims = (f"{bundle.cpus:g}", str(bundle.gpus), str(role.threads))
            table.add_row(role.role, process, role.device, *claims, what[role.role])
    return table


def _descriptions(configuration: Configuration) -> dict[str, str]:
    """The model, method or address of each role, by role."""
    target, draft, server = configuration.target, configuration.draft, configuration.server
    return {
        "target": f"{target.path} ({target.dtype})",
        "draft": draft.name + (f": {draft.weights.path}" if draft.weights is not None else ""),
        "coordinator": f"gRPC {join_host_port(server.grpc_host, server.grpc_port)}",
        "ingress": f"HTTP {join_host_port(server.http_host, server.http_port)}",
    }
