"""Runs a training in this process, or in several by Ray Train."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from deploy.distillation.rank_writer import RankWriter
from deploy.distillation.single_process import SingleProcess, Texts, TextWriter, own_quantization
from deploy.settings import cache_directory, code_directory
from workers.distill.data import ANSWERS
from workers.serve.configuration import load_configuration

STATES = "states"
"""The directory of hidden states beside the answers. Those of a writer with settings have `-` and its name for them."""
_SEQUENCES = (32, 256)
"""Texts that the engine writes at the same time: on a CPU, on a GPU."""


def execute(
    make: type[SingleProcess],
    chosen: argparse.Namespace,
    told: Callable[[str], None] | None = None,
    writer: TextWriter | None = None,
) -> Texts:
    """Write texts and train on them, in this process or in several. Returns the texts. Raises `PilotfishError`.

    The `writer` has the target; without one, the serving engine has it in this process. The processes that train read
    the texts' hidden states, which are stored, and never have it.
    """
    if chosen.answers is None:
        chosen.answers = chosen.out.with_name(f"{chosen.out.name}.work") / ANSWERS
        chosen.answers.parent.mkdir(parents=True, exist_ok=True)
    run = make(chosen, told)
    with ExitStack() as stack:
        if writer is None:
            writer = stack.enter_context(RankWriter(_configuration(run), run.tell, chosen.max_length))
        run.writer, settings = writer, writer.settings
        chosen.states = chosen.states or chosen.answers.parent / (f"{STATES}-{settings}" if settings else STATES)
        run.remember(settings)
        if run.directory_of_training is not None:
            stack.enter_context(run.directory_of_training.held())
        if chosen.workers == 1:
            return run.run()
        from deploy.distillation.ray_trainers import run_in_workers  # it needs Ray

        texts = run.texts()
        if not run.had_ended():
            run.store(texts)
            run_in_workers(chosen, make, run.directory_of_training)
        run.tell(f"{chosen.out} is written")
        return texts


def _configuration(run: SingleProcess) -> Configuration:
    """The target of a run on one rank of the serving engine, in the type in which the training has its ends."""
    target = {"path": str(run.directory), "device": run.device.type, "dtype": str(run.dtype).removeprefix("torch.")}
    target["quantization"] = own_quantization(run.directory)
    target["compile_directory"] = str(code_directory(cache_directory()))
    sequences = min(run.options.rows, _SEQUENCES[run.device.type == "cuda"])
    return load_configuration(
        {}, {f"target.{key}": value for key, value in target.items()} | {"scheduler.max_sequences": sequences}
    )


def run_command(command: Callable[[], Texts]) -> int:
    """Run a command. Returns its exit code."""
    try:
        command()
    except PilotfishError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0
