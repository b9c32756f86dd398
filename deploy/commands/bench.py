"""`pilotfish bench race`: measure drafting methods against plain decoding on the same prompts."""

from __future__ import annotations

import typer

from deploy.commands.options import ConfigOption, SetOption
from deploy.dataclass_options import command_with_options
from deploy.race.options import RaceOptions
from deploy.terminal import output

bench = typer.Typer(no_args_is_help=True, help="Measure drafting methods.")


@bench.callback()
def measure() -> None:
    """Measure drafting methods."""


@bench.command()
@command_with_options(RaceOptions)
def race(options: RaceOptions, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Run drafting methods against plain decoding on the same prompts: methods, tasks, batches, temperatures."""
    from deploy.race.competitors import RaceSettings
    from deploy.race.race import run  # imports torch, once all options are checked
    from deploy.race.report.tables import markdown

    results = run(options, RaceSettings(config, tuple(assignments or ())))
    output.print(markdown(results), markup=False)
