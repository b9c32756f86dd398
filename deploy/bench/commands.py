"""`pilotfish bench`: measure drafting methods, the quality of answers, or a server under load."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.core.errors import WorkerUnavailable
from deploy.bench.options import AgreementOptions, EvaluationOptions, LoadOptions, RaceOptions
from deploy.commands.options import ConfigOption, SetOption
from deploy.dataclass_options import command_with_options
from deploy.progress import ProgressReporter
from deploy.settings import load_settings
from deploy.signals import SIGNALLED
from deploy.terminal import notices, output, write_json

if TYPE_CHECKING:
    from deploy.bench.measuring.results import BenchResults  # imports torch

bench = typer.Typer(no_args_is_help=True, help="Measure drafting methods, or a server under load.")


@bench.callback()
def measure() -> None:
    """Measure drafting methods, or a server under load."""


@bench.command()
@command_with_options(RaceOptions)
def race(options: RaceOptions, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Run drafting methods against plain decoding on the same prompts: methods, tasks, batches, temperatures."""
    from deploy.bench.measuring.competitors import BenchSettings
    from deploy.bench.race.race import run  # imports torch, once all options are checked
    from deploy.bench.race.report import markdown

    results = run(options, BenchSettings(config, tuple(assignments or ())))
    output.print(markdown(results), markup=False)
    _check_measured(results)


@bench.command("serve")
@command_with_options(LoadOptions)
def serve_bench(
    options: LoadOptions,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    more_bounds: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME:MS]...", help="Further bounds of --goodput.")
    ] = None,
) -> None:
    """Send requests to an OpenAI-compatible server: rates, concurrency, latency percentiles, goodput.

    Without --url, that is the server that the settings describe.
    """
    options = replace(options, goodput=(*options.goodput, *(more_bounds or ())))
    settings = load_settings(config, assignments or (), is_client=True)
    from deploy.bench.load_test import report
    from deploy.bench.load_test.run import run_load_test  # imports torch, once all options are checked

    with ProgressReporter(notices, "bench serve") as progress:
        results = run_load_test(options, settings, shlex.join(["pilotfish", *sys.argv[1:]]), progress)
    if as_json:
        write_json(report.as_json(results))
    else:
        output.print(report.markdown(results), markup=False)
    if results.was_stopped:
        notices.print(f"stopped; the results so far are above{f' and in {options.out}' if options.out else ''}")
        raise typer.Exit(SIGNALLED)
    if not all(found.completed for found in results.measurements):
        raise WorkerUnavailable("a measurement has no answer")


@bench.command()
@command_with_options(EvaluationOptions)
def tasks(options: EvaluationOptions, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Run tasks with references: the quality and the cost of plain decoding, drafting methods and transformers."""
    from deploy.bench.evaluation.evaluate import run  # imports torch, once all options are checked
    from deploy.bench.evaluation.report import markdown
    from deploy.bench.measuring.competitors import BenchSettings

    for evaluation in run(options, BenchSettings(config, tuple(assignments or ()))):
        output.print(markdown(evaluation), markup=False)
        _check_measured(evaluation.results)


@bench.command()
@command_with_options(AgreementOptions)
def agreement(options: AgreementOptions, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Compare a draft model with a target on a file of texts: perplexity, agreement, predicted and measured speed."""
    from deploy.bench.agreement.agree import run  # imports torch, once all options are checked
    from deploy.bench.agreement.report import markdown
    from deploy.bench.measuring.competitors import BenchSettings

    output.print(markdown(run(options, BenchSettings(config, tuple(assignments or ())))), markup=False)


def _check_measured(results: BenchResults) -> None:
    """Raise `WorkerUnavailable` if no competitor has a measurement, with the first reason."""
    if results.cells and all(found.skipped for found in results.cells):
        raise WorkerUnavailable(f"nothing was measured; {results.cells[0].skipped}")
