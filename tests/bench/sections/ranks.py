"""Tensor-parallel ranks: transformers' own sharded layers, plain local shards, and one rank with as many cores.

The same processes measure all of them in turn, with the same weights. While one rank computes alone, the others wait.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
from multiprocessing.queues import Queue
from unittest.mock import patch

import torch
from torch import distributed

from cluster.core.config.target_section import TargetSection
from tests.bench.decoding import Decoding
from tests.bench.options import Options
from tests.bench.report import heading, ratios, spread, table
from workers.model import loading
from workers.verify.build import build_engine
from workers.verify.group import join_group, leave_group

RANKS = 3
BATCHES = (1, 8)
FORMS = ("transformers' layers", "plain shards")
ALONE = {"one rank, modules": "off", "one rank, kernels": "auto"}
"""One rank with all cores: forms and their `target.native`."""
WARM_STEPS, TIMED_STEPS = 2, 8

Times = dict[tuple[str, int], list[float]]


def run(options: Options) -> None:
    """Measure and report."""
    heading("Ranks: tensor parallelism on the cores of this machine")
    section = options.configuration("target.kv.pool_bytes=268435456", "target.compile='off'").target.model_copy(
        update={"tensor_parallel": RANKS}
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    answers: Queue[Times] = context.Queue()
    prompt, repeats = options.long_prompt(64, 0), 1 if options.quick else options.repeats
    processes = [
        context.Process(target=_run_rank, args=(section, rank, port, prompt, repeats, answers), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    times = answers.get(timeout=600)
    for process in processes:
        process.join(timeout=60)
    rows = [
        [
            form,
            str(batch),
            spread([value * 1e3 for value in times[form, batch]], 1),
            spread(ratios(times[form, batch], times[FORMS[1], batch])),
        ]
        for batch in BATCHES
        for form in (*FORMS, *ALONE)
    ]
    table(("form", "batch", "step, ms", "÷ plain shards"), rows)


def _run_rank(
    section: TargetSection, rank: int, port: int, prompt: tuple[int, ...], repeats: int, answers: Queue[Times]
) -> None:
    """One rank. All ranks take the same steps."""
    threads = max(1, (os.cpu_count() or 1) // RANKS)
    torch.set_num_threads(threads)
    join_group(section, rank, "127.0.0.1", port)
    with patch.object(loading, "replace_linear_layers", lambda *_: None):
        engines = {FORMS[0]: build_engine(section, rank)}
    engines[FORMS[1]] = build_engine(section, rank)
    if rank == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        for form, native in ALONE.items():
            engines[form] = build_engine(section.model_copy(update={"tensor_parallel": 1, "native": native}))
    times: Times = {(form, batch): [] for form in (*FORMS, *ALONE) for batch in BATCHES}
    for _ in range(repeats):
        for form in (*FORMS, *ALONE):
            distributed.barrier()
            torch.set_num_threads((os.cpu_count() or 1) if form in ALONE else threads)
            for batch in BATCHES if form in engines else ():
                times[form, batch].append(_median_step(Decoding(engines[form], 64), prompt, batch))
    distributed.barrier()
    if rank == 0:
        answers.put(times)
    leave_group()


def _median_step(decoding: Decoding, prompt: tuple[int, ...], batch: int) -> float:
    """Median seconds of a step with `batch` rows of one token."""
    for index in range(batch):
        decoding.add(f"s{index}", (*prompt[:-1], prompt[-1] + index))
    spent = [decoding.step() for _ in range(WARM_STEPS + TIMED_STEPS)][WARM_STEPS:]
    decoding.clear()
    return statistics.median(spent)
