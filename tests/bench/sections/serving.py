"""The whole cluster: tokens per second with and without drafts, and the time of a round outside its step.

Plain and drafted configurations run in turn. Every ratio compares successive runs; its spread is over the repetitions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import Settings
from tests.bench.client import Answers, ask_all
from tests.bench.generate import Generate
from tests.bench.options import Options
from tests.bench.report import heading, ratios, spread, table, write

BATCHES = (1, 4, 8)
METHODS = ("none", "ngram")
PROMPTS, QUICK_PROMPTS = 8, 2
ROUND = "pilotfish:round_overhead_seconds"
STEP = "pilotfish:target_step_seconds"
PROPOSE = "pilotfish:propose_latency_seconds"


@dataclass(frozen=True)
class ServingRun:
    """One pass of one configuration at one batch size through all prompts."""

    answers: Answers
    step_seconds: float
    """Mean time of a target step, in seconds."""
    overhead_seconds: float
    """Mean time of a round without the forward pass and the drafter (coordinator and gRPC), in seconds."""
    propose_seconds: float
    """Mean time that a round waits for drafts, gRPC included, in seconds."""

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.answers.each]

    @property
    def committed_per_step(self) -> float:
        return self.answers.tokens / sum(answer.steps for answer in self.answers.each)

    @property
    def other_seconds(self) -> float:
        return self.overhead_seconds + self.propose_seconds


Runs = dict[tuple[str, int], list[ServingRun]]
"""The passes by drafting method and batch size, one per repetition."""


def totals(url: str) -> dict[str, tuple[float, float]]:
    """Sum and count of each histogram in `/metrics`."""
    values: dict[str, list[float]] = {name: [0.0, 0.0] for name in (ROUND, STEP, PROPOSE)}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        for name, entry in values.items():
            if line.startswith(f"{name}_sum"):
                entry[0] += float(line.split()[-1])
            elif line.startswith(f"{name}_count"):
                entry[1] += float(line.split()[-1])
    return {name: (entry[0], entry[1]) for name, entry in values.items()}


def measure(cluster: ServeCluster, prompts: Sequence[tuple[int, ...]], tokens: int, batch: int) -> ServingRun:
    """Measure one pass through all prompts."""
    before = totals(cluster.http_url)
    answers = asyncio.run(ask_all(cluster.grpc_address, prompts, tokens, batch))
    after = totals(cluster.http_url)
    rounds = after[STEP][1] - before[STEP][1]
    step, overhead, propose = ((after[name][0] - before[name][0]) / rounds for name in (STEP, ROUND, PROPOSE))
    return ServingRun(answers, step, overhead, propose)


def report(runs: Runs, alone: float) -> None:
    """Print one row per method and batch size."""
    rows: list[list[str]] = []
    for (method, batch), measured in runs.items():
        plain = [run.answers.rate for run in runs[METHODS[0], batch]]
        rates = [run.answers.rate for run in measured]
        rows.append(
            [
                method,
                str(batch),
                spread(rates, 1),
                spread(ratios(rates, plain)),
                spread([run.committed_per_step for run in measured]),
                spread([run.step_seconds * 1e3 for run in measured], 1),
                spread([run.other_seconds * 1e3 for run in measured], 1),
                f"{spread([run.other_seconds / run.step_seconds * 100 for run in measured], 1)} %",
            ]
        )
    table(
        (
            "drafts",
            "batch",
            "tokens/s",
            "÷ plain",
            "committed per step",
            "step, ms",
            "other, ms",
            "share of step",
        ),
        rows,
    )
    write(
        f"transformers generate, batch 1, same prompts: {alone:.1f} tokens/s; plain ÷ transformers at batch 1: "
        f"{spread([run.answers.rate / alone for run in runs[METHODS[0], 1]])}"
    )
    for batch in BATCHES:
        same = all(
            run.tokens == other.tokens
            for method in METHODS
            for run, other in zip(runs[method, batch], runs[METHODS[0], 1], strict=True)
        )
        write(f"batch {batch}: answers equal to plain decoding's at batch 1: {'yes' if same else 'NO'}")


def transformers_rate(settings: Settings, prompts: Sequence[tuple[int, ...]], tokens: int) -> float:
    """Tokens per second of `generate` of `transformers`: greedy, one prompt at a time, a thread per core."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = Generate(Path(settings.configuration.target.path), "float32")
    return model.answer_all(prompts, tokens, 1).rate


def run(options: Options) -> None:
    """Measure and report. The prefix cache is off, because every repetition sends the same prompts."""
    heading("Serving: drafts against plain decoding, through the whole cluster")
    settings = options.settings("target.kv.prefix_cache=false")
    prompts = options.prompts(QUICK_PROMPTS if options.quick else PROMPTS)
    write(
        f"{settings.configuration.target.served_name}, {settings.configuration.target.dtype}; {len(prompts)} prompts "
        f"of {min(map(len, prompts))}–{max(map(len, prompts))} tokens, {options.tokens} tokens each, greedy"
    )
    alone = transformers_rate(settings, prompts, options.tokens)
    runs: Runs = {(method, batch): [] for batch in BATCHES for method in METHODS}
    with ServeCluster(settings, lambda _: None) as cluster:
        for repeat in range(options.repeats):
            for method in METHODS:
                drafting = settings.configuration.draft.model_copy(update={"method": method})
                if cluster.configuration.draft != drafting:
                    cluster.redeploy(settings.configuration.model_copy(update={"draft": drafting}))
                for batch in BATCHES:
                    runs[method, batch].append(measure(cluster, prompts, options.tokens, batch))
                    rate = runs[method, batch][-1].answers.rate
                    write(f"repetition {repeat + 1}, {method}, batch {batch}: {rate:.1f} tokens/s")
    report(runs, alone)
