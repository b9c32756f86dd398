"""Compares the time of a target step with the time to read its weights once from memory.

The bandwidth is measured beside each variant in every repetition, so that both see the same machine.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch

from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import PilotfishError
from deploy.bench.measuring.roofs import ReadBandwidth
from tests.bench.decoding import Decoding, alike, decoding
from tests.bench.machine import weight_bytes
from tests.bench.options import Options
from tests.bench.report import Stopwatch, heading, ratios, spread, table, write

CONTEXT, QUICK_CONTEXT = 128, 16
"""Tokens stored for each sequence."""
SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (32, 1), (1, 8))
"""Number of sequences, and query tokens of each: its last token and a chain of drafted tokens."""
MODULES = {"native": "off", "compile": "off"}
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "compile": "off"},
    "bfloat16": {"dtype": "bfloat16", "compile": "off"},
    "int8": {"dtype": "bfloat16", "compile": "off", "quantization": "int8"},
    "stored": {"dtype": "bfloat16", "compile": "off", "quantization": "stored"},
    "bfloat16, modules": MODULES | {"dtype": "bfloat16"},
    "bfloat16, modules compiled": MODULES | {"dtype": "bfloat16", "compile": "on"},
}
"""The variants: computed by Pilotfish's kernels, or, named `modules`, by the modules of `transformers`."""
WARM_STEPS, TIMED_STEPS = 3, 12

Times = dict[tuple[str, tuple[int, int]], list[float]]
"""Seconds of a step by variant and shape: the median of a few steps, one per repetition."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Step: the target by itself against reading its weights once")
    torch.set_num_threads(os.cpu_count() or 1)
    configuration = options.configuration(f"scheduler.max_sequences={max(batch for batch, _ in SHAPES)}")
    sections = {
        name: configuration.target.model_copy(update=changes)
        for name, changes in VARIANTS.items()
        if name in (options.variants or tuple(VARIANTS))
    }
    times: Times = {(name, shape): [] for name in sections for shape in SHAPES}
    bandwidths: dict[str, list[float]] = {name: [] for name in sections}
    with ExitStack() as stack:
        engines = _load(stack, configuration, sections)
        bandwidth, prompt = ReadBandwidth(), options.long_prompt(QUICK_CONTEXT if options.quick else CONTEXT, 0)
        for repeat in range(options.repeats):
            for name, engine in engines.items():
                bandwidths[name].append(bandwidth.measure())
                for batch, queries in SHAPES:
                    steps = 2 if options.quick else TIMED_STEPS
                    seconds = engine.median_step(alike(prompt, batch), queries, warm=WARM_STEPS, timed=steps)
                    times[name, (batch, queries)].append(seconds)
            write(f"repetition {repeat + 1}: {', '.join(_glance(times, name) for name in engines)}")
    _report({name: sections[name] for name in engines}, times, bandwidths, len(prompt))


def _load(stack: ExitStack, configuration: Configuration, sections: dict[str, TargetSection]) -> dict[str, Decoding]:
    """Load all variants at once. A variant that this machine or model does not support is skipped with its reason."""
    engines: dict[str, Decoding] = {}
    for name, section in sections.items():
        try:
            with Stopwatch() as watch:
                engines[name] = stack.enter_context(decoding(section, configuration.scheduler.max_step_tokens))
        except PilotfishError as error:
            write(f"{name}: skipped: {error}")
        else:
            write(f"{name}: loaded in {watch.seconds:.1f} s")
    return engines


def _glance(times: Times, name: str) -> str:
    return f"{name} {' / '.join(f'{times[name, shape][-1] * 1e3:.1f}' for shape in SHAPES)} ms"


def _report(sections: dict[str, TargetSection], times: Times, bandwidths: dict[str, list[float]], context: int) -> None:
    rows: list[list[str]] = []
    for name, section in sections.items():
        size = weight_bytes(section, read_by_a_step=True)
        floors = [size / bandwidth for bandwidth in bandwidths[name]]
        for shape in SHAPES:
            seconds = times[name, shape]
            batch, queries = shape
            rows.append(
                [
                    name,
                    f"{size / 1e6:.0f}",
                    str(batch),
                    str(queries),
                    spread([value * 1e3 for value in seconds], 1),
                    spread(ratios(seconds, floors)),
                    spread([batch / value for value in seconds], 0),
                ]
            )
    table(("variant", "weights, MB", "batch", "queries", "step, ms", "÷ floor", "steps × batch, 1/s"), rows)
    everything = [value / 1e9 for values in bandwidths.values() for value in values]
    write(
        f"floor: weight bytes ÷ read bandwidth, {spread(everything, 1)} GB/s with {torch.get_num_threads()} threads; "
        f"about {context} tokens stored for each sequence"
    )
