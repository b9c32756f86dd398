"""Plain decoding of many requests: the cluster over gRPC against `generate` of `transformers`, in turn."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch

from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import Settings
from tests.bench.client import Answers, ask_all
from tests.bench.generate import Generate
from tests.bench.options import Options
from tests.bench.report import heading, ratios, spread, table, write

BATCHES = (8, 32)
PROMPTS, QUICK_PROMPTS = 32, 8
COLUMNS = ("type", "batch", "Pilotfish, tokens/s", "transformers, tokens/s", "÷ transformers", "equal answers")


def run(options: Options) -> None:
    """Measure one cluster per type. Both sides have the same prompts; drafts and prefix cache are off."""
    heading("Throughput: plain decoding against transformers generate")
    prompts = options.prompts(QUICK_PROMPTS if options.quick else PROMPTS)
    write(
        f"{len(prompts)} prompts of {min(map(len, prompts))}–{max(map(len, prompts))} tokens, "
        f"{options.tokens} tokens each, greedy"
    )
    torch.set_num_threads(os.cpu_count() or 1)
    rows: list[list[str]] = []
    for dtype in options.dtypes:
        settings = options.settings(
            "draft.method=none", "target.kv.prefix_cache=false", f"scheduler.max_sequences={max(BATCHES)}"
        )
        rows.extend(_alternate(options, _typed(settings, dtype), prompts))
    table(COLUMNS, rows)


def _typed(settings: Settings, dtype: str) -> Settings:
    configuration = settings.configuration
    target = configuration.target.model_copy(update={"dtype": dtype})
    changed = configuration.model_copy(update={"target": target})
    return Settings(changed, settings.cache_directory, settings.ray_address)


def _alternate(options: Options, settings: Settings, prompts: list[tuple[int, ...]]) -> list[list[str]]:
    target = settings.configuration.target
    alone = Generate(Path(target.path), target.dtype)
    alone.answer_all(prompts[:2], 2, 2)
    ours: dict[int, list[Answers]] = {batch: [] for batch in BATCHES}
    theirs: dict[int, list[Answers]] = {batch: [] for batch in BATCHES}
    with ServeCluster(settings, lambda _: None) as cluster:
        asyncio.run(ask_all(cluster.grpc_address, prompts, 4, max(BATCHES)))
        for repeat in range(options.repeats):
            for batch in BATCHES:
                ours[batch].append(asyncio.run(ask_all(cluster.grpc_address, prompts, options.tokens, batch)))
                theirs[batch].append(alone.answer_all(prompts, options.tokens, batch))
                write(
                    f"repetition {repeat + 1}, {target.dtype}, batch {batch}: "
                    f"{ours[batch][-1].rate:.1f} and {theirs[batch][-1].rate:.1f} tokens/s"
                )
    return [_row(target.dtype, batch, ours[batch], theirs[batch]) for batch in BATCHES]


def _row(dtype: str, batch: int, ours: list[Answers], theirs: list[Answers]) -> list[str]:
    our_rates, their_rates = [answers.rate for answers in ours], [answers.rate for answers in theirs]
    equal = sum(one.tokens == other.tokens for one, other in zip(ours[0].each, theirs[0].each, strict=True))
    return [
        dtype,
        str(batch),
        spread(our_rates, 1),
        spread(their_rates, 1),
        spread(ratios(our_rates, their_rates)),
        f"{equal} of {len(ours[0].each)}",
    ]
