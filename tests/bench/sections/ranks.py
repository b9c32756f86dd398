"""Tensor-parallel ranks: transformers' own sharded layers, plain local shards, and one rank with as many cores.

The same processes measure all of them in turn, with the same weights. While one rank computes alone, the others wait.
A target whose heads the ranks do not divide is replaced by a model of SmolLM2-135M's size with random weights.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.queues import Queue
from pathlib import Path
from unittest.mock import patch

import torch
from torch import distributed
from transformers import AutoConfig

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from tests.bench.decoding import Decoding, alike
from tests.bench.options import Options
from tests.bench.random_model import Shape
from tests.bench.report import heading, ratios, spread, table, write
from workers.model import loading
from workers.model.sharding import check_divisible
from workers.serve.node import free_port
from workers.verify.build import build_engine
from workers.verify.group import join_group, leave_group

BATCHES = (1, 8)
FORMS = ("transformers' layers", "plain shards")
"""Forms of several ranks."""
ALONE = {"one rank, modules": "off", "one rank, kernels": "auto"}
"""One rank with all cores: forms and their `target.native`."""
WARM_STEPS, TIMED_STEPS = 2, 8

Times = dict[tuple[str, int], list[float]]


def run(options: Options) -> None:
    """Measure and report."""
    heading("Ranks: tensor parallelism on the cores of this machine")
    section = options.configuration("target.kv.pool_bytes=268435456", "target.compile='off'").target
    with tempfile.TemporaryDirectory() as folder:
        if not _divides(section, options.ranks):
            shape = replacement(options.ranks)
            shape.write_weights(Path(folder))
            write(
                f"{options.ranks} ranks do not divide the heads of {Path(section.path).name}: random weights, {shape}"
            )
            section = section.model_copy(update={"path": folder})
        times = _measure(section.model_copy(update={"tensor_parallel": options.ranks}), options)
    batches = options.batches or BATCHES
    threads = threads_of_a_rank(options.ranks)
    write(f"{section.dtype}; {options.ranks} ranks: {threads} thread(s) each; one rank: {os.cpu_count()} threads")
    rows = [
        [
            form if form in ALONE else f"{options.ranks} ranks, {form}",
            str(batch),
            spread([value * 1e3 for value in times[form, batch]], 1),
            spread(ratios(times[form, batch], times[FORMS[1], batch])),
        ]
        for batch in batches
        for form in (*FORMS, *ALONE)
    ]
    table(("form", "batch", "step, ms", "÷ plain shards"), rows)


def replacement(ranks: int) -> Shape:
    """A shape of about the size of SmolLM2-135M with one KV head for each rank."""
    return Shape(576, 1536, 30, 3 * ranks, ranks, 49152, head=-(-576 // (3 * ranks * 16)) * 16, tied=True)


def threads_of_a_rank(ranks: int) -> int:
    """Threads of each of several ranks, which share the cores."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _divides(section: TargetSection, ranks: int) -> bool:
    try:
        check_divisible(AutoConfig.from_pretrained(section.path), ranks)
    except ConfigurationError:
        return False
    return True


def _measure(section: TargetSection, options: Options) -> Times:
    """Run the ranks, each in a process of its own. Returns what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    answers: Queue[Times] = context.Queue()
    port, batches = free_port("127.0.0.1"), options.batches or BATCHES
    prompt, repeats = options.long_prompt(64, 0), 1 if options.quick else options.repeats
    processes = [
        context.Process(target=_run_rank, args=(section, rank, port, prompt, repeats, batches, answers), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    times = answers.get(timeout=600)
    for process in processes:
        process.join(timeout=60)
    return times


def _run_rank(
    section: TargetSection,
    rank: int,
    port: int,
    prompt: tuple[int, ...],
    repeats: int,
    batches: tuple[int, ...],
    answers: Queue[Times],
) -> None:
    """One rank. All ranks take the same steps."""
    threads = threads_of_a_rank(section.tensor_parallel)
    torch.set_num_threads(threads)
    join_group(section, rank, "127.0.0.1", port)
    with patch.object(loading, "replace_linear_layers", lambda *_: None):
        engines = {FORMS[0]: build_engine(section, rank)}
    engines[FORMS[1]] = build_engine(section, rank)
    if rank == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        for form, native in ALONE.items():
            engines[form] = build_engine(section.model_copy(update={"tensor_parallel": 1, "native": native}))
    times: Times = {(form, batch): [] for form in (*FORMS, *ALONE) for batch in batches}
    for _ in range(repeats):
        for form in (*FORMS, *ALONE):
            distributed.barrier()
            torch.set_num_threads((os.cpu_count() or 1) if form in ALONE else threads)
            for batch in batches if form in engines else ():
                rows = Decoding(engines[form], 64)
                seconds = rows.median_step(alike(prompt, batch), 1, warm=WARM_STEPS, timed=TIMED_STEPS)
                times[form, batch].append(seconds)
    distributed.barrier()
    if rank == 0:
        answers.put(times)
    leave_group()
