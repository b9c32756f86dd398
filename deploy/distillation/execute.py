"""Runs a training in this process, or in several by Ray Train."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from cluster.core.errors import PilotfishError
from deploy.distillation.single_process import SingleProcess, Texts, TextWriter
from workers.distill.data import ANSWERS

STATES = "states"
"""The directory of hidden states beside the answers. Those of a writer with settings have `-` and its name for them."""


def execute(
    make: type[SingleProcess],
    chosen: argparse.Namespace,
    told: Callable[[str], None] | None = None,
    writer: TextWriter | None = None,
) -> Texts:
    """Write texts and train on them, in this process or in several. Returns the texts. Raises `PilotfishError`.

    Several processes read the texts' hidden states, which this one stores, and never have the target. With a `writer`,
    no process that trains has it.
    """
    run = make(chosen, told)
    run.writer = writer
    if chosen.workers == 1 and writer is None:
        stored = None if chosen.answers is None else chosen.answers.parent / STATES
        if chosen.states is None and stored is not None and stored.is_dir():
            chosen.states = stored
        run.remember()
        return run.run()
    if chosen.answers is None:
        chosen.answers = chosen.out.with_name(f"{chosen.out.name}.work") / ANSWERS
        chosen.answers.parent.mkdir(parents=True, exist_ok=True)
    settings = "" if writer is None else writer.settings
    chosen.states = chosen.states or chosen.answers.parent / (f"{STATES}-{settings}" if settings else STATES)
    run.remember(settings)
    if chosen.workers == 1:
        return run.run()
    from deploy.distillation.ray_trainers import run_in_workers  # it needs Ray

    texts = run.texts()
    if not run.had_ended():
        run.store(texts)
        run.release()
        run_in_workers(chosen, make, run.directory_of_training)
    run.tell(f"{chosen.out} is written")
    return texts


def run_command(command: Callable[[], Texts]) -> int:
    """Run a command. Returns its exit code."""
    try:
        command()
    except PilotfishError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0
