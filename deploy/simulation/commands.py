"""`pilotfish simulate`: run the control plane on a virtual clock, and a target's steps on a device that nobody has."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import command_with_options
from deploy.progress import ProgressReporter
from deploy.simulation.capacity.options import CapacityOptions
from deploy.terminal import notices, output

simulate = typer.Typer(no_args_is_help=True, help="Run the control plane on a virtual clock.")


@simulate.callback()
def run_virtually() -> None:
    """Run the control plane on a virtual clock, with simulated targets and drafters."""


@simulate.command()
def faults(
    schedules: Annotated[int, typer.Option(help="Number of fault schedules.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule; the next one's is one higher.")] = 0,
    workers: Annotated[int, typer.Option(help="Number of processes; 0 takes one per core.")] = 0,
    replay: Annotated[
        int | None, typer.Option(metavar="SEED", help="Run the schedule of one seed and print what happens.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", hidden=True, help="Print one line of JSON per schedule.")] = False,
) -> None:
    """Kill, freeze and disturb simulated clusters, and check every token, every block and every wait."""
    if schedules < 1 or workers < 0 or seed < 0:
        raise ConfigurationError("--schedules must be at least 1, --workers and --seed at least 0")
    from deploy.simulation.faults.campaign import run_all, to_line
    from deploy.simulation.faults.run import run_schedule
    from deploy.simulation.faults.schedule import derive

    if replay is not None:
        output.print(derive(replay), markup=False)
        run = run_schedule(replay, lambda text: output.print(text, markup=False))
        for violation in run.violations:
            output.print(f"violated: {violation}", markup=False)
        output.print(f"{run.complete} of {run.clients} answers complete, {len(run.violations)} violations")
        raise typer.Exit(1 if run.violations else 0)
    if lines:
        for one in range(seed, seed + schedules):
            sys.stdout.write(to_line(run_schedule(one)) + "\n")
            sys.stdout.flush()
        return
    with ProgressReporter(notices, "fault schedules") as report:
        result = run_all(seed, schedules, min(schedules, workers or os.cpu_count() or 1), report)
    for line in result.lines():
        output.print(line, markup=False)
    raise typer.Exit(1 if result.failed else 0)


@simulate.command()
@command_with_options(CapacityOptions)
def capacity(options: CapacityOptions) -> None:
    """Simulate a cluster of any size under load: throughput, latency percentiles, idle time, speed-up per GPU.

    Steps and drafts take what `simulate step` predicts of --model, --ranks, --draft and --device, or measured times.
    """
    from deploy.simulation.capacity.capacity_run import simulate_capacity
    from deploy.simulation.capacity.report import markdown, write
    from deploy.simulation.capacity.step_times import measured_times

    if options.is_predicted:
        from deploy.simulation.capacity.predicted_times import predicted_times  # imports torch, which takes seconds

        with ProgressReporter(notices, "times of steps") as report:
            times = predicted_times(options, lambda share: report(share, "steps are counted"))
    else:
        times = measured_times(Path(options.step_times))
    wanted = {"drafts": True} if options.has_drafts else {}
    if options.plain or not options.has_drafts:
        wanted["plain"] = False
    runs = {}
    for name, drafts in wanted.items():
        with ProgressReporter(notices, name) as report:
            runs[name] = simulate_capacity(options, times, report, drafts=drafts)
    output.print(markdown(options, runs), markup=False)
    if options.out is not None:
        for file in write(options.out, options, runs):
            output.print(f"wrote {file}", markup=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """A model, its GPUs, and what of it is predicted."""

    model: Annotated[str, "Name of a model whose configuration is known."] = "Llama-3.1-8B"
    ranks: Annotated[int, "Ranks that share the model, a GPU each; one of them is simulated."] = 1
    device: Annotated[Literal["H100", "H200"], "The GPU of each rank."] = "H100"
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], "As `target.kv.dtype`."] = "auto"
    symmetric_memory: Annotated[Literal["off", "on"], "As `target.symmetric_memory`: how ranks sum."] = (
        TargetSection.model_fields["symmetric_memory"].default
    )
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Instead, predict a long prompt by `scheduler.max_prompt_tokens`.")
    ] = False
    draft: Annotated[
        Literal["none", "eagle"], "`eagle`: instead, predict rounds with an EAGLE head on the target's GPU."
    ] = "none"


@simulate.command()
@command_with_options(StepOptions)
def step(options: StepOptions) -> None:
    """Predict the time of a target's steps on a GPU, from their kernels, bytes and operations; no GPU is needed."""
    from deploy.simulation.device.models import check_eagle, rank_model
    from deploy.simulation.device.prediction import prediction_table, prompts_table
    from deploy.simulation.device.rounds import rounds_table
    from deploy.simulation.device.speeds import DEVICES

    rank, device = rank_model(options.model, options.ranks, options.kv_dtype), DEVICES[options.device]
    if options.draft == "eagle":
        check_eagle(rank)
        output.print(rounds_table(rank, device))
        return
    table = prompts_table if options.prompts else prediction_table
    output.print(table(rank, device, symmetric_memory=options.symmetric_memory == "on"))
