"""Steps of large models with random weights: contexts, batches, drafts, forms and prompts, against reading the weights.

On a GPU, the models have the shapes of Llama 3.1: 8B, and what one of eight tensor-parallel ranks holds of 70B. On CPU
the same tables come from a small shape, which shows that the section runs.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.core.config.target_section import TargetSection
from deploy.bench.measuring.roofs import ReadBandwidth
from deploy.settings import load_settings
from tests.bench.decoding import Decoding
from tests.bench.machine import weight_bytes
from tests.bench.options import Options
from tests.bench.random_model import Shape
from tests.bench.report import Stopwatch, heading, ratios, spread, table, write
from tests.bench.sections.target.engine_forms import FORMS, Form, Measured, built
from tests.support.engines.one_rank import group_of_one
from workers.model.devices import choose_device

CHUNK = 2048
"""Most tokens of a prompt in one step."""
CONTEXTS = {"cuda": (128, 2048), "cpu": (128,)}
BATCHES, DRAFTED = (1, 8, 64), (0, 3, 7, 31)
TEXTS, TEXT_TOKENS, BESIDE = 4, 48, 8
WARM_STEPS, TIMED_STEPS = 10, 12
"""Warm steps are not timed: layers that are compiled compile for sizes they have not had, outside of CUDA graphs."""
ON_GPU = ("target.kv.pool_bytes=null", "target.kv.memory_fraction=0.5")
DEFAULTS = (
    "target.dtype=bfloat16",
    "target.device=auto",
    "target.native=off",
    "draft.methods=[none]",
)
"""Settings of the section, on a GPU with those of `ON_GPU`. A configuration file replaces them; `--set` overrides."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is measured."""

    name: str
    shape: Shape
    in_a_group: bool = False
    """Whether it is a tensor-parallel rank: its steps have all-reduces, and its decisions an all-gather."""


MODELS = {
    "cuda": (
        Model("Llama-3.1-8B", Shape(4096, 14336, 32, 32, 8, 128256)),
        Model("Llama-3.1-70B, one of 8 ranks", Shape(8192, 3584, 80, 8, 1, 16032), in_a_group=True),
    ),
    "cpu": (
        Model("small", Shape(256, 768, 4, 4, 2, 4096, head=64)),
        Model("small, one of 2 ranks", Shape(256, 384, 4, 2, 1, 2048, head=64), in_a_group=True),
    ),
}
NOTES = """
- floor: weight bytes that a step reads ÷ read bandwidth. Steps hold random tokens, which are rejected.
- stored: tokens of each sequence before the first step; every step adds one.
- fused: `target.compile: auto`; compiled: `on`; recorded: steps are CUDA graphs, captured before the first one, as by
  default.
- texts: greedy texts of random weights, whose best tokens often lie close: alone, in a batch of 8, and with drafts of
  four right tokens.
- replayed: share of the timed steps that were replayed. Larger ones (see `graph_sizes`) run without a graph.
- one of n ranks: the only rank of a group over NCCL (gloo on CPU). The all-reduces after each attention and each
  feed-forward network run inside the step, recorded where the step is; an all-gather decides. With one rank they move
  no bytes. Not included: the time on the links between GPUs, waiting for other ranks, the broadcast of commands."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: stored tokens, numbers of sequences, drafted tokens for each, and tokens in a prompt."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    drafted: tuple[int, ...]
    prompt: int
    steps: int
    repeats: int

    @property
    def warm_steps(self) -> int:
        """Steps before the timed ones."""
        return WARM_STEPS if self.steps >= TIMED_STEPS else 1

    def end(self, context: int) -> int:
        """Most tokens that a sequence has at its end, drafted ones included."""
        steps = self.repeats * len(self.drafted) * (self.warm_steps + self.steps)
        return context + steps * 2 + 1 + max(self.drafted)  # an accepted token now and then


def run(options: Options) -> None:
    """Measure and report."""
    heading("Device: random weights in the shapes of large models")
    device = choose_device(_section(options).device, 0).type
    write(torch.cuda.get_device_name() if device == "cuda" else "no GPU: small shapes on CPU, and nothing is recorded")
    contexts, batches = options.contexts or CONTEXTS[device], options.batches or BATCHES
    sizes = Sizes(contexts, batches, DRAFTED, CHUNK, TIMED_STEPS, options.repeats)
    if options.quick:
        sizes = Sizes(contexts[:2], batches[:2], DRAFTED[:2], 64, 2, 1)
    bandwidth = ReadBandwidth(device)
    found = [bandwidth.measure() for _ in range(max(2, options.repeats))]
    del bandwidth
    write(f"read bandwidth: {spread([value / 1e9 for value in found], 0)} GB/s")
    rows: list[list[str]] = []
    prompts: list[list[str]] = []
    texts: list[list[str]] = []
    for model in MODELS[device]:
        for form in FORMS:
            if device == "cuda":
                torch.cuda.empty_cache()  # the next pool is a share of the free memory
            with group_of_one(device) if model.in_a_group else nullcontext():
                lines, prompt, text = _in_form(options, model, form, sizes, max(found))
                gc.collect()  # nothing refers to the model any more
            rows += lines
            prompts.append([model.name, form.name, *prompt])
            texts.append([model.name, form.name, *text])
    figures = ("step, ms", "÷ floor", "÷ no draft", "steps × batch, 1/s", "replayed")
    table(("model", "form", "stored", "batch", "drafted each", *figures), rows)
    table(("model", "form", "prompt, tokens", "tokens/s", "TFLOP/s in weights"), prompts)
    table(("model", "form", "equal beside others", "equal with drafts", "steps with drafts", "tokens each"), texts)
    write(NOTES.strip())


def _in_form(
    options: Options, model: Model, form: Form, sizes: Sizes, bandwidth: float
) -> tuple[list[list[str]], list[str], list[str]]:
    """The lines of a model in one form in the table of steps, the figures of its prompt, and those of its texts."""
    with _random_model(options, model, form) as section:
        floor = weight_bytes(section, read_by_a_step=True) / bandwidth
        with built(section, form, CHUNK) as measured:
            write(f"{model.name}, {form.name}: attention by {measured.attention}")
            rows = _steps([model.name, form.name], measured, sizes, floor)
            return rows, _prompt(measured, sizes, section), _texts(measured.engine, 2 if options.quick else TEXTS)


@contextmanager
def _random_model(options: Options, model: Model, form: Form) -> Iterator[TargetSection]:
    """A target with random weights. What the section compares overrides the settings."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        model.shape.write(directory)
        fixed = (f"target.path={directory}", "target.load_format=dummy", f"target.compile='{form.compile}'")
        yield _section(options, *fixed)


def _section(options: Options, *fixed: str) -> TargetSection:
    """The chosen settings of the target, with those that are `fixed` over them."""
    own = (*DEFAULTS, *(ON_GPU if torch.cuda.is_available() else ()))
    below = options.assignments if options.config else (*own, *options.assignments)
    return load_settings(options.config, fixed, below=below).configuration.target


def _steps(names: list[str], measured: Measured, sizes: Sizes, floor: float) -> list[list[str]]:
    """One line of the table per context, batch and number of drafted tokens."""
    lines: list[list[str]] = []
    info = measured.engine.engine.info()
    for context in sizes.contexts:
        longest = min(sizes.end(context), info.max_context_len)
        fitting = info.kv.blocks_total // -(-longest // info.layout.block_size)
        for batch in sizes.batches:
            if batch > fitting or sizes.end(context) > info.max_context_len:
                write(f"{', '.join(names)}, {context}: {batch} sequences do not fit into the KV pool, or the context")
                continue
            for index in range(batch):
                prompt = [(7 * index + position) % 2000 for position in range(context)]
                measured.engine.add(f"s{index}", prompt)
            lines += _of_batch([*names, str(context), str(batch)], measured, sizes, floor, batch)
            measured.engine.clear()
    return lines


def _of_batch(names: list[str], measured: Measured, sizes: Sizes, floor: float, batch: int) -> list[list[str]]:
    """One line of the table per number of drafted tokens."""
    lines: list[list[str]] = []
    plain: list[float] = []
    for drafted in sizes.drafted:
        seconds, replayed = [], 0
        for _ in range(sizes.repeats):
            seconds.append(_warm_median(measured, drafted, sizes))
            replayed += measured.replayed
        plain = plain or seconds
        lines.append(
            [
                *names,
                str(drafted),
                spread([value * 1e3 for value in seconds]),
                spread([value / floor for value in seconds]),
                spread(ratios(seconds, plain)),
                spread([batch / value for value in seconds], 0),
                f"{replayed / (sizes.repeats * sizes.steps):.0%}",
            ]
        )
    return lines


def _warm_median(measured: Measured, drafted: int, sizes: Sizes) -> float:
    """Median seconds of a step with `drafted` tokens after the last one of each sequence. Counts replays from 0."""
    for _ in range(sizes.warm_steps):
        measured.engine.step(1 + drafted)
    measured.replayed = 0
    return statistics.median(measured.engine.step(1 + drafted) for _ in range(sizes.steps))


def _prompt(measured: Measured, sizes: Sizes, section: TargetSection) -> list[str]:
    """Rate of a prompt, and the products with weights that it is equal to."""
    seconds: list[float] = []
    for repeat in range(1 + sizes.repeats):
        with Stopwatch() as watch:
            measured.engine.add("prompt", [(repeat + position) % 2000 for position in range(sizes.prompt)])
        measured.engine.clear()
        seconds.append(watch.seconds)
    rates = [sizes.prompt / value for value in seconds[1:]]  # the first one compiles
    parameters = weight_bytes(section, read_by_a_step=True) / 2
    return [str(sizes.prompt), spread(rates, 0), spread([2 * parameters * rate / 1e12 for rate in rates])]


def _texts(engine: Decoding, count: int) -> list[str]:
    """How many texts are the same in a batch, and with drafts; the steps with drafts; the tokens of each text."""
    vocabulary = engine.engine.info().vocabulary_size
    prompts = [[(131 * index + 17 * at * at + at) % vocabulary for at in range(64)] for index in range(BESIDE)]
    alone = [_written(engine, {"alone": prompt})["alone"] for prompt in prompts[:count]]
    batch = _written(engine, {str(index): prompt for index, prompt in enumerate(prompts)})
    with_drafts, steps = [], 0
    for prompt, text in zip(prompts, alone, strict=False):
        engine.add("drafted", prompt)
        while (end := len(engine.text("drafted"))) < len(text):
            engine.verify("drafted", text[end : end + 4])
            steps += 1
        with_drafts.append(engine.text("drafted")[: len(text)])
        engine.clear()
    return [
        f"{sum(batch[str(index)] == text for index, text in enumerate(alone))} of {count}",
        f"{sum(one == other for one, other in zip(with_drafts, alone, strict=True))} of {count}",
        f"{steps / count:.1f}",
        str(TEXT_TOKENS),
    ]


def _written(engine: Decoding, prompts: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """The texts of prompts that are decoded together, prompts included."""
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    for _ in range(TEXT_TOKENS - 1):
        engine.step()
    found = {name: engine.text(name) for name in prompts}
    engine.clear()
    return found
