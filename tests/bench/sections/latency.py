"""Measures how much long prompts delay running answers, with and without a bound on prompt tokens per step."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import torch

from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from tests.bench.client import Answer, ask, connected
from tests.bench.options import Options
from tests.bench.report import heading, percentile, ratios, spread, table, write

RUNNING = 4
"""Number of running answers."""
LONG_PROMPT = 512
LONG_PROMPTS = 4
SMALL = 32
"""`scheduler.max_prompt_tokens` of the cluster that has a bound."""
STEP_TOKENS = 512
"""`scheduler.max_step_tokens`: a long prompt fits into one step."""
PAUSE_SECONDS = 0.5
"""Pause between the first token of a long prompt and the next long prompt, in seconds."""
LONGEST_ANSWER = 2000
"""Tokens. The running answers are cancelled after the last long prompt."""


@dataclass
class Latencies:
    """Latencies of one scheduling, in seconds, one value per repetition."""

    median: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    long_prompt: list[float] = field(default_factory=list)
    """Median time to the first token of a long prompt, in seconds."""

    def note(self, gaps: Sequence[float], first_tokens: Sequence[float]) -> None:
        """Add one repetition."""
        self.median.append(percentile(gaps, 0.5))
        self.p99.append(percentile(gaps, 0.99))
        self.longest.append(max(gaps))
        self.long_prompt.append(percentile(first_tokens, 0.5) if first_tokens else 0.0)


def run(options: Options) -> None:
    """Measure and report."""
    heading("Latency: between the tokens of running answers while long prompts arrive")
    torch.set_num_threads(os.cpu_count() or 1)
    asyncio.run(_run(options))


async def _run(options: Options) -> None:
    """Measure two clusters in turn, in one process."""
    bounds = {"unset": "null", str(SMALL): str(SMALL)}
    found = {name: Latencies() for name in ("no long prompts", *bounds)}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, bound in bounds.items():
            configuration = options.configuration(
                "draft.method=none",
                "target.kv.prefix_cache=false",
                f"scheduler.max_step_tokens={STEP_TOKENS}",
                f"scheduler.max_prompt_tokens={bound}",
            )
            cluster = await stack.enter_async_context(LocalCluster(configuration))
            clients[name] = await stack.enter_async_context(connected(cluster.grpc_address))
            await ask(clients[name], options.long_prompt(LONG_PROMPT, 0), 2)
        long_prompts = 1 if options.quick else LONG_PROMPTS
        for repeat in range(options.repeats):
            found["no long prompts"].note(*await _repetition(options, clients["unset"], 0))
            for name, client in clients.items():
                found[name].note(*await _repetition(options, client, long_prompts))
            write(f"repetition {repeat + 1}: p99 {_glance(found)}")
    _report(found)


async def _repetition(options: Options, client: GenerationClient, long_prompts: int) -> tuple[list[float], list[float]]:
    """The gaps between tokens while all answers run, and the time to the first token of each long prompt."""
    answers: list[Answer] = []
    running = [asyncio.create_task(ask(client, prompt, LONGEST_ANSWER, answers)) for prompt in options.prompts(RUNNING)]
    while len(answers) < RUNNING or not all(answer.arrivals for answer in answers):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
    begun = time.perf_counter()
    first_tokens: list[float] = []
    for index in range(max(1, long_prompts)):
        await asyncio.sleep(PAUSE_SECONDS)
        if long_prompts:
            answer = await ask(client, options.long_prompt(LONG_PROMPT, 1 + index), 1)
            first_tokens.append(answer.first_token_seconds)
    await asyncio.sleep(PAUSE_SECONDS)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(PAUSE_SECONDS)  # until the server has released them
    gaps = [
        gap
        for answer in answers
        for arrival, gap in zip(answer.arrivals[1:], answer.gaps, strict=True)
        if arrival - gap >= begun
    ]
    return gaps, first_tokens


def _glance(found: dict[str, Latencies]) -> str:
    return ", ".join(f"{name} {latencies.p99[-1] * 1e3:.0f} ms" for name, latencies in found.items())


def _report(found: dict[str, Latencies]) -> None:
    unset = found["unset"]
    rows = []
    for name, latencies in found.items():
        rows.append(
            [
                name,
                *(
                    spread([seconds * 1e3 for seconds in values], 1)
                    for values in (latencies.median, latencies.p99, latencies.longest)
                ),
                spread(ratios(latencies.p99, unset.p99)),
                spread([seconds * 1e3 for seconds in latencies.long_prompt], 0) if any(latencies.long_prompt) else "–",
            ]
        )
    table(
        (
            "max_prompt_tokens",
            "p50, ms",
            "p99, ms",
            "longest, ms",
            "p99 ÷ unset's",
            f"first token of a {LONG_PROMPT}-token prompt, ms",
        ),
        rows,
    )
