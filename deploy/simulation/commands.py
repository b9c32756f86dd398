"""`pilotfish simulate`: run the control plane on a virtual clock, and a target's steps on a device that nobody has."""

from __future__ import annotations

import os
import sys
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
    """Simulate a cluster of any size under load: throughput, latency percentiles, idle time, speed-up per GPU."""
    from deploy.simulation.capacity.capacity_run import simulate_capacity
    from deploy.simulation.capacity.report import markdown, write

    times = options.times()
    wanted = {"drafts": True} if options.drafters else {}
    if options.plain or not options.drafters:
        wanted["plain"] = False
    runs = {}
    for name, drafts in wanted.items():
        with ProgressReporter(notices, name) as report:
            runs[name] = simulate_capacity(options, times, report, drafts=drafts)
    output.print(markdown(options, runs), markup=False)
    if options.out is not None:
        for file in write(options.out, options, runs):
            output.print(f"wrote {file}", markup=False)


@simulate.command()
def step(
    model: Annotated[str, typer.Option(help="Name of a model whose configuration is known.")] = "Llama-3.1-8B",
    ranks: Annotated[int, typer.Option(help="Ranks that share the model; one of them is simulated.")] = 1,
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], typer.Option(help="As `target.kv.dtype`.")] = "auto",
    symmetric_memory: Annotated[
        Literal["off", "on"], typer.Option(help="As `target.symmetric_memory`: how ranks sum.")
    ] = TargetSection.model_fields["symmetric_memory"].default,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Instead, predict a long prompt by `scheduler.max_prompt_tokens`.")
    ] = False,
    draft: Annotated[
        Literal["none", "eagle"], typer.Option(help="`eagle`: instead, predict rounds with an EAGLE head on the GPU.")
    ] = "none",
) -> None:
    """Predict the time of a target's steps on an H100, from their kernels, bytes and operations; no GPU is needed."""
    from deploy.simulation.device.models import MODELS, RankModel, kv_heads
    from deploy.simulation.device.prediction import prediction_table, prompts_table
    from deploy.simulation.device.rounds import rounds_table

    if model not in MODELS:
        raise ConfigurationError(f"--model {model}: unknown; it must be one of {', '.join(MODELS)}")
    if ranks < 1 or kv_heads(model) % ranks:
        raise ConfigurationError(f"--ranks {ranks}: refused; it must divide the {kv_heads(model)} KV heads of {model}")
    if ranks > 1 and MODELS[model].model_type == "gpt_oss":
        raise ConfigurationError(f"--ranks {ranks}: refused; for {model}, whose experts have biases, it must be 1")
    if ranks > 1 and MODELS[model].model_type == "qwen3_next":
        raise ConfigurationError(f"--ranks {ranks}: refused; for {model}, whose states are not divided, it must be 1")
    rank = RankModel(model, ranks, kv_dtype=kv_dtype)
    if draft == "eagle":
        if ranks > 1:
            raise ConfigurationError(f"--ranks {ranks}: refused; with --draft eagle it must be 1")
        if type(MODELS[model]).__name__ not in ("LlamaConfig", "Qwen3Config"):
            raise ConfigurationError(f"--model {model}: refused; with --draft eagle its layers must be dense")
        output.print(rounds_table(rank))
        return
    table = prompts_table if prompts else prediction_table
    output.print(table(rank, symmetric_memory=symmetric_memory == "on"))
