"""Steps of large models with random weights: batches, drafts, recorded graphs and prompts, against reading the weights.

On a GPU, the models have the shapes of Llama 3.1: 8B, and what one of eight tensor-parallel ranks holds of 70B. On CPU
the same tables come from a small shape, which shows that the section runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from cluster.core.config.target_section import TargetSection
from deploy.bench.measuring.roofs import ReadBandwidth
from tests.bench.decoding import Decoding, decoding
from tests.bench.machine import weight_bytes
from tests.bench.options import Options
from tests.bench.report import Stopwatch, heading, ratios, spread, table, write

CONTEXT, CHUNK = 128, 2048
"""Tokens stored for each sequence, and most tokens of a prompt in one step."""
BATCHES, DRAFTED = (1, 8, 32, 128), (0, 4, 8, 32)
WARM_STEPS, TIMED_STEPS = 10, 12
"""A size of step is recorded as a CUDA graph when it occurs for the eighth time."""
GRAPHS = {"eager": "off", "compiled, recorded": "auto"}
"""Values of `target.compile`. On CUDA, everything but `off` compiles layers and records steps as CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 128

    def write(self, directory: Path) -> None:
        """Write the configuration into `directory`, where `load_format: dummy` reads it."""
        LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(directory)


LARGE = {
    "Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B, one of 8 ranks": Shape(8192, 3584, 80, 8, 1, 16032),
}
SMALL = {"small": Shape(256, 768, 4, 4, 2, 4096, head=64)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: numbers of sequences, of drafted tokens for each, and of tokens in a prompt."""

    batches: tuple[int, ...]
    drafted: tuple[int, ...]
    prompt: int
    steps: int


def run(options: Options) -> None:
    """Measure and report."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    heading("Device: random weights in the shapes of large models")
    write(torch.cuda.get_device_name() if on_gpu else "no CUDA device: a small shape on CPU")
    sizes = Sizes(BATCHES, DRAFTED, CHUNK, TIMED_STEPS)
    if options.quick:
        sizes = Sizes(BATCHES[:2], DRAFTED[:2], 64, 2)
    bandwidth = ReadBandwidth(device)
    found = [bandwidth.measure() for _ in range(max(2, options.repeats))]
    del bandwidth
    write(f"read bandwidth: {spread([value / 1e9 for value in found], 0)} GB/s")
    rows: list[list[str]] = []
    prompts: list[list[str]] = []
    for name, shape in (LARGE if on_gpu else SMALL).items():
        for graphs, compiled in GRAPHS.items():
            with _random_model(shape, device, compiled) as section:
                floor = weight_bytes(section, read_by_a_step=True) / max(found)
                with decoding(section, CHUNK) as engine:
                    rows += _steps([name, graphs], engine, sizes, floor, options.repeats)
                    prompts.append([name, graphs, *_prompt(engine, sizes, section, options.repeats)])
            write(f"{name}, {graphs}: measured")
    columns = ("model", "steps", "batch", "drafted each", "step, ms", "÷ floor", "÷ no draft", "steps × batch, 1/s")
    table(columns, rows)
    table(("model", "steps", "prompt, tokens", "tokens/s", "TFLOP/s in weights"), prompts)
    write("floor: weight bytes that a step reads ÷ read bandwidth. Steps hold random tokens, which are rejected.")


@contextmanager
def _random_model(shape: Shape, device: str, compiled: str) -> Iterator[TargetSection]:
    """A target with random weights, bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        shape.write(directory)
        settings: dict[str, Any] = json.loads(TargetSection(path=str(directory)).model_dump_json())
        settings |= {"load_format": "dummy", "dtype": "bfloat16", "device": device, "compile": compiled}
        if device == "cuda":
            settings["kv"] |= {"memory_fraction": 0.5}
        yield TargetSection.model_validate(settings)


def _steps(names: list[str], engine: Decoding, sizes: Sizes, floor: float, repeats: int) -> list[list[str]]:
    """One line of the table per batch and number of drafted tokens."""
    lines: list[list[str]] = []
    for batch in sizes.batches:
        for index in range(batch):
            engine.add(f"s{index}", [(7 * index + position) % 4000 for position in range(CONTEXT)])
        plain: list[float] = []
        for drafted in sizes.drafted:
            seconds = [_median(engine, drafted, sizes.steps) for _ in range(repeats)]
            plain = plain or seconds
            lines.append(
                [
                    *names,
                    str(batch),
                    str(drafted),
                    spread([value * 1e3 for value in seconds]),
                    spread([value / floor for value in seconds]),
                    spread(ratios(seconds, plain)),
                    spread([batch / value for value in seconds], 0),
                ]
            )
        engine.clear()
    return lines


def _median(engine: Decoding, drafted: int, steps: int) -> float:
    """Median seconds of a step with `drafted` tokens after the last one of each sequence."""
    for _ in range(WARM_STEPS if steps > WARM_STEPS else 1):
        engine.step(1 + drafted)
    return statistics.median(engine.step(1 + drafted) for _ in range(steps))


def _prompt(engine: Decoding, sizes: Sizes, section: TargetSection, repeats: int) -> list[str]:
    """Rate of a prompt, and the products with weights that it is equal to."""
    seconds: list[float] = []
    for repeat in range(1 + repeats):
        with Stopwatch() as watch:
            engine.add("prompt", [(repeat + position) % 4000 for position in range(sizes.prompt)])
        engine.clear()
        seconds.append(watch.seconds)
    rates = [sizes.prompt / value for value in seconds[1:]]  # the first one compiles
    parameters = weight_bytes(section, read_by_a_step=True) / 2
    return [str(sizes.prompt), spread(rates, 0), spread([2 * parameters * rate / 1e12 for rate in rates])]
