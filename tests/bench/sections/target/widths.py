"""The time of a step by its width, from one token to a long prompt: the kernels, and the modules of `transformers`.

Steps of as many tokens stand beside each other, as eight sequences with one token each (8 × 1) and one sequence with a
chain of eight (1 × 8). Beside each time stand its two floors: reading all weights once, and computing the products of
the linear layers at the peak of the processor's vectors. Kernels and modules run in turn, so that both see the same
machine.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack

import torch
from transformers import AutoConfig

from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from deploy.bench.measuring.roofs import ReadBandwidth
from tests.bench.decoding import alike, decoding
from tests.bench.machine import weight_bytes
from tests.bench.options import Options
from tests.bench.product_peak import product_peak
from tests.bench.report import heading, ratios, spread, table, write

CONTEXT, QUICK_CONTEXT = 128, 16
"""Tokens stored for each sequence that decodes."""
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 64), (1, 8)
CHAINS, QUICK_CHAINS = (4, 8, 16, 32), (4,)
"""Tokens of one sequence that are verified in one step."""
PROMPTS, QUICK_PROMPTS = (128, 512, 1500), (32,)
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "stored": {"dtype": "bfloat16", "quantization": "stored"},
}
COMPARED = ("float32", "bfloat16")
"""Variants that the modules compute, too. With int8, they take seconds for a prompt."""
WARM_STEPS, TIMED_STEPS = 1, 5
COLUMNS = ("variant", "tokens", "kernels, ms", "modules, ms", "modules ÷ kernels", "÷ weights", "÷ products")

Times = dict[tuple[str, bool, str], list[float]]
"""Seconds by variant, whether the kernels computed, and step; one per repetition."""


def run(options: Options) -> None:
    """Measure and report, one variant after another."""
    heading("Widths: one step by its number of tokens")
    torch.set_num_threads(os.cpu_count() or 1)
    rows, prompts = (QUICK_ROWS, QUICK_PROMPTS) if options.quick else (ROWS, PROMPTS)
    chains = QUICK_CHAINS if options.quick else CHAINS
    steps = tuple(sorted((*((count, 1) for count in rows), *((1, length) for length in chains)), key=math.prod))
    configuration = options.configuration(f"scheduler.max_sequences={max(rows)}", "scheduler.max_step_tokens=2048")
    bandwidth = ReadBandwidth()
    for name in options.variants or tuple(VARIANTS):
        section = configuration.target.model_copy(update=VARIANTS[name] | {"compile": "off"})
        reads, times = _measure(options, configuration, section, name, steps, prompts, bandwidth)
        _report(section, name, reads, times, steps, prompts)


def _measure(
    options: Options,
    configuration: Configuration,
    section: TargetSection,
    name: str,
    steps: tuple[tuple[int, int], ...],
    prompts: tuple[int, ...],
    bandwidth: ReadBandwidth,
) -> tuple[list[float], Times]:
    """Bandwidths and times, one per repetition."""
    times: Times = {}
    reads: list[float] = []
    context = options.long_prompt(QUICK_CONTEXT if options.quick else CONTEXT, 0)
    with ExitStack() as stack:
        sections = {True: section}
        if name in COMPARED:
            sections[False] = section.model_copy(update={"native": "off"})
        chunk = configuration.scheduler.max_step_tokens
        engines = {native: stack.enter_context(decoding(one, chunk)) for native, one in sections.items()}
        for _ in range(options.repeats):
            reads.append(bandwidth.measure())
            for count, queries in steps:
                for native, engine in engines.items():
                    rows = alike(context, count)
                    seconds = engine.median_step(rows, queries, warm=WARM_STEPS, timed=TIMED_STEPS)
                    times.setdefault((name, native, _decoded(count, queries)), []).append(seconds)
            for length in prompts:
                for native, engine in engines.items():
                    seconds = engine.add("prompt", options.long_prompt(length, 1))
                    engine.clear()
                    times.setdefault((name, native, _prompt(length)), []).append(seconds)
    return reads, times


def _decoded(count: int, queries: int) -> str:
    return f"{count} × {queries}"


def _prompt(length: int) -> str:
    return f"prompt of {length}"


def _report(
    section: TargetSection,
    name: str,
    reads: list[float],
    times: Times,
    steps: tuple[tuple[int, int], ...],
    prompts: tuple[int, ...],
) -> None:
    size = weight_bytes(section, read_by_a_step=True)
    peak = product_peak(torch.bfloat16 if name == "bfloat16" else torch.float32)
    lines: list[list[str]] = []
    for label, tokens, is_prompt in [
        *((_decoded(*step), step[0] * step[1], False) for step in steps),
        *((_prompt(length), length, True) for length in prompts),
    ]:
        ours, theirs = times[name, True, label], times.get((name, False, label), [])
        operations = 2.0 * _factors(section, tokens, is_prompt=is_prompt)
        products = "" if peak is None else spread([seconds * peak / operations for seconds in ours])
        lines.append(
            [
                name,
                label,
                spread([seconds * 1e3 for seconds in ours], 1),
                spread([seconds * 1e3 for seconds in theirs], 1) if theirs else "",
                spread(ratios(theirs, ours)) if theirs else "",
                spread([seconds * read / size for seconds, read in zip(ours, reads, strict=True)]),
                products,
            ]
        )
    table(COLUMNS, lines)
    limit = "unknown" if peak is None else f"{peak / 1e9:.0f} GFLOP/s"
    write(
        f"{name}: {size / 1e6:.0f} MB of weights, read at {spread([read / 1e9 for read in reads], 1)} GB/s; "
        f"peak of products: {limit}; {torch.get_num_threads()} threads"
    )


def _factors(section: TargetSection, tokens: int, *, is_prompt: bool) -> int:
    """Multiplications of the linear layers in a step. Of a prompt, only the last token passes the head."""
    config = AutoConfig.from_pretrained(section.path)
    head = int(config.vocab_size) * int(config.hidden_size)
    layers = weight_bytes(section.model_copy(update={"dtype": "float32", "quantization": "none"}), read_by_a_step=True)
    return (layers // 4 - head) * tokens + head * (1 if is_prompt else tokens)
