"""Measures the gain of stored keys and values: within an answer, and between requests with a common prefix."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from deploy.local.local_cluster import LocalCluster
from tests.bench.client import ask, connected
from tests.bench.decoding import Decoding, decoding
from tests.bench.options import Options
from tests.bench.report import heading, ratios, spread, table, write

CONTEXTS = (32, 64, 128, 256, 512, 1024)
QUICK_CONTEXTS = (32, 64, 128)
STEPS = 8
REPEATED_PROMPTS = (128, 512)

Curve = dict[int, list[float]]
"""Seconds per generated token by context length; one per repetition."""


def run(options: Options) -> None:
    """Measure and report both tables, and plot the first."""
    torch.set_num_threads(os.cpu_count() or 1)
    _within_an_answer(options)
    asyncio.run(_between_requests(options))


def _within_an_answer(options: Options) -> None:
    heading("Prefix: cost of one more token, keeping keys and values or computing them again")
    contexts = QUICK_CONTEXTS if options.quick else CONTEXTS
    configuration = options.configuration()
    kept: Curve = {length: [] for length in contexts}
    again: Curve = {length: [] for length in contexts}
    with decoding(configuration.target, configuration.scheduler.max_step_tokens) as engine:
        for repeat in range(options.repeats + 1):
            for length in contexts:
                recomputed, cached = _both(engine, options.long_prompt(length, 0))
                if repeat > 0:  # the first repetition also pays for preparation
                    again[length].append(recomputed)
                    kept[length].append(cached)
    table(
        ("context, tokens", "kept, ms per token", "computed again, ms per token", "again ÷ kept"),
        [
            [
                str(length),
                spread([seconds * 1e3 for seconds in kept[length]], 1),
                spread([seconds * 1e3 for seconds in again[length]], 1),
                spread(ratios(again[length], kept[length]), 1),
            ]
            for length in contexts
        ],
    )
    write(f"growth with the context m: kept m^{growth(kept):.2f}, computed again m^{growth(again):.2f}")
    if options.plot is not None:
        plot(kept, again, options.plot)


def _both(engine: Decoding, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds of one token: with the whole context recomputed, and with stored keys and values."""
    engine.clear()
    recomputed = engine.add("m", prompt)
    engine.step()
    return recomputed, statistics.median(engine.step() for _ in range(STEPS))


def growth(curve: Curve) -> float:
    """The exponent e of cost ~ m^e, fitted to the longer half of the contexts."""
    lengths = sorted(curve)[len(curve) // 2 :]
    abscissae = [math.log(length) for length in lengths]
    slope, _ = statistics.linear_regression(abscissae, [math.log(statistics.median(curve[m])) for m in lengths])
    return slope


def plot(kept: Curve, again: Curve, file: Path) -> None:
    """Draw both curves on logarithmic axes, with bars from the least to the most."""
    try:
        from matplotlib import pyplot
    except ImportError:
        write("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for label, curve in (("computed again", again), ("kept", kept)):
        middles = [statistics.median(values) * 1e3 for values in curve.values()]
        below = [middle - min(values) * 1e3 for middle, values in zip(middles, curve.values(), strict=True)]
        above = [max(values) * 1e3 - middle for middle, values in zip(middles, curve.values(), strict=True)]
        axes.errorbar(list(curve), middles, yerr=(below, above), marker="o", capsize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms per generated token")
    axes.set_xticks(list(kept), [str(length) for length in kept])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="keys and values")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    write(f"plot: {file}")


def new_prompts(options: Options, lengths: Sequence[int], repeat: int) -> dict[int, tuple[int, ...]]:
    """A prompt of each length. None begins like another one, of this repetition or of an earlier one."""
    first = 1 + repeat * len(lengths)
    return {length: options.long_prompt(length, first + index) for index, length in enumerate(lengths)}


async def _between_requests(options: Options) -> None:
    """Measure two clusters in turn, with and without the prefix cache."""
    heading("Prefix: time to the first token of a prompt asked twice")
    lengths = REPEATED_PROMPTS[:1] if options.quick else REPEATED_PROMPTS
    times: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    async with AsyncExitStack() as stack:
        clients = {}
        for name in ("off", "on"):
            configuration = options.configuration(
                "draft.method=none", f"target.kv.prefix_cache={'true' if name == 'on' else 'false'}"
            )
            cluster = await stack.enter_async_context(LocalCluster(configuration))
            clients[name] = await stack.enter_async_context(connected(cluster.grpc_address))
            await ask(clients[name], options.long_prompt(lengths[0], 0), 4)
        for repeat in range(options.repeats):
            for length, prompt in new_prompts(options, lengths, repeat).items():
                for name, client in clients.items():
                    seconds = [(await ask(client, prompt, 2)).first_token_seconds for _ in range(2)]
                    for values, value in zip(times.setdefault((name, length), ([], [])), seconds, strict=True):
                        values.append(value)
    table(
        ("prefix cache", "prompt, tokens", "first time, ms", "second time, ms", "second ÷ first"),
        [
            [
                name,
                str(length),
                spread([seconds * 1e3 for seconds in first], 1),
                spread([seconds * 1e3 for seconds in second], 1),
                spread(ratios(second, first)),
            ]
            for (name, length), (first, second) in sorted(times.items())
        ],
    )
