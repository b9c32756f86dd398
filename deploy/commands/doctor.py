"""`pilotfish doctor`: report what is wrong with this machine and what the running processes show to the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from deploy.commands.options import ConfigOption, SetOption
from deploy.settings import code_directory, load_settings
from deploy.terminal import notices, output, write_json

if TYPE_CHECKING:
    from deploy.doctor.finding import Finding
    from deploy.doctor.network import Exposure

JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def doctor(config: ConfigOption = None, assignments: SetOption = None, as_json: JsonOption = False) -> None:
    """Check the environment, the models, the kernels and the listening processes. Exit with 1 if there is a problem."""
    settings = load_settings(config, assignments or ())
    # Importing torch takes seconds, so the settings are checked first.
    from deploy.doctor.environment import environment_findings, kernel_findings, prompt_log_findings
    from deploy.doctor.models import model_findings
    from deploy.doctor.network import exposures, network_findings
    from deploy.network.listeners import cluster_processes, listeners

    with notices.status("looking"):
        found = exposures(listeners(cluster_processes()))
        findings = (
            *environment_findings(),
            *kernel_findings(code_directory(settings.cache_directory)),
            *model_findings(settings.configuration, settings.cache_directory),
            *prompt_log_findings(settings.configuration.draft),
            *network_findings(found),
        )
    if as_json:
        write_json(report(findings, found))
    else:
        _print(findings, found)
    if any(finding.is_problem for finding in findings):
        raise typer.Exit(1)


def report(findings: Sequence[Finding], found: Sequence[Exposure]) -> dict[str, object]:
    """The report as values of JSON."""
    return {
        "problems": sum(finding.is_problem for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "listeners": [
            asdict(one.listener) | {"loopback": one.listener.is_loopback, "demands": one.demand.value} for one in found
        ],
    }


def _print(findings: Sequence[Finding], found: Sequence[Exposure]) -> None:
    if found:
        table = Table(box=SIMPLE, title="Listening processes of Pilotfish and Ray", title_justify="left")
        for heading in ("process", "pid", "address", "port", "loopback", "demands"):
            table.add_column(heading, justify="right" if heading in ("pid", "port") else "left")
        for one in found:
            listener = one.listener
            loopback = "yes" if listener.is_loopback else "NO"
            cells = (str(listener.pid), listener.host, str(listener.port), loopback, one.demand.value)
            table.add_row(listener.process, *cells)
        output.print(table)
    for finding in findings:
        output.print(f"{'PROBLEM' if finding.is_problem else 'ok':8}{finding}", markup=False)
