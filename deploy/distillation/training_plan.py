"""`pilotfish distill --plan`: what the training of a DSpark drafter takes on 1, 2, 4 and 8 devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.core.errors import ConfigurationError
from deploy.distillation import dspark
from deploy.distillation.single_process_job import block_words
from deploy.terminal import output
from workers.distill.memory import (
    BlockBatch,
    TargetSize,
    TrainingMemory,
    block_flops,
    block_memory,
    block_size,
    text_bytes,
)
from workers.distill.options import DistillOptions
from workers.model.public_shapes import MaskedBlockShape

RANKS = (1, 2, 4, 8)
"""Numbers of devices that are planned for."""
_FLOPS_PER_SECOND = 989e12  # NVIDIA's data sheet, H100 SXM, bfloat16 without sparsity
_UTILIZATION = 0.4  # an assumption: the share of that peak which a training reaches
_LINK_BYTES_PER_SECOND = 450e9  # NVIDIA's data sheet: 900 GB/s NVLink in both directions together
_USABLE = 0.95  # an assumption: the rest is lost to fragments of the allocator and to libraries


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """One configuration of a training, in bytes of one device."""

    ranks: int
    recomputes: bool
    memory: TrainingMemory
    most_text_tokens: int
    """Tokens of texts that fit one device's memory; below 0, not even the training fits."""
    tokens_per_second: float
    """Predicted tokens of texts, padding included, that all devices train on in a second."""

    text_tokens: int
    """Tokens of the texts that one device holds."""

    @property
    def fits(self) -> bool:
        """Whether all texts fit."""
        return self.most_text_tokens >= self.text_tokens


def plan_block(
    target: TargetSize, shape: MaskedBlockShape, batch: BlockBatch, text_tokens: int, device_bytes: float
) -> list[PlannedTraining]:
    """Plan a training on 1, 2, 4 and 8 devices with and without activations that are computed again.

    `batch` is what one device computes in a step; `text_tokens` are those of all devices together.
    """
    found = []
    each_token = text_bytes(shape.taps, shape.body.hidden_size)
    for ranks in RANKS:
        for recomputes in (False, True):
            own = -(-text_tokens // ranks)
            memory = block_memory(target, shape, batch, own, ranks=ranks, recomputes=recomputes)
            free = int(_USABLE * device_bytes) - (memory.peak - memory.texts)
            seconds = block_flops(target, shape, batch, recomputes=recomputes) / (_UTILIZATION * _FLOPS_PER_SECOND)
            # Parameters are gathered for both passes, and gradients are scattered, all in float32.
            moved = 3 * 4 * block_size(shape).parameters * (ranks - 1) / ranks
            seconds += moved / _LINK_BYTES_PER_SECOND
            rate = ranks * batch.rows * batch.length / seconds
            found.append(PlannedTraining(ranks, recomputes, memory, free // each_token, rate, own))
    return found


def print_plan(options: DistillOptions, target: Path) -> None:
    """Print the plan of a command whose target is a directory with a config.json. Raises `ConfigurationError`."""
    if not (target / "config.json").is_file():
        raise ConfigurationError(f"target.path: {target} is refused; --plan needed a directory with a config.json")
    config = AutoConfig.from_pretrained(target, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = TargetSize(sum(one.numel() for one in model.parameters()), config.hidden_size, config.vocab_size)
    needed = ["--target", str(target), "--prompts", "unused", "--out", "unused"]
    chosen = dspark.options([*needed, "--max-length", str(options.max_length), *block_words(options)])
    taps = options.taps or dspark.default_taps(int(config.num_hidden_layers))
    shape = dspark.block_shape(config, chosen, len(taps))
    batch = BlockBatch(chosen.batch_rows, options.max_length, chosen.blocks)
    planned = plan_block(size, shape, batch, options.answer_tokens, options.device_gb * 1e9)
    if options.json:
        output.print_json(json.dumps(description(size, shape, batch, planned)))
    else:
        output.print(plan_table(size, shape, batch, planned, options.device_gb))


def description(
    target: TargetSize, shape: MaskedBlockShape, batch: BlockBatch, planned: Sequence[PlannedTraining]
) -> dict[str, Any]:
    """The plan as JSON values, in bytes."""
    return {
        "target": asdict(target),
        "module_parameters": block_size(shape).parameters,
        "batch": asdict(batch) | {"slots": shape.slots},
        "plans": [
            asdict(one) | {"held": one.memory.held, "peak": one.memory.peak, "fits": one.fits} for one in planned
        ],
    }


def plan_table(
    target: TargetSize,
    shape: MaskedBlockShape,
    batch: BlockBatch,
    planned: Sequence[PlannedTraining],
    device_gb: float,
) -> Table:
    """One row per number of devices, with and without activations that are computed again."""
    table = Table(
        title=(
            f"A DSpark drafter of {block_size(shape).parameters / 1e6:,.0f} M parameters for a target of "
            f"{target.parameters / 1e9:.1f} B: GB of each device.\nA step of one device: {batch.rows} rows of "
            f"{batch.length} tokens, {batch.blocks} blocks of {shape.slots} in a row. Tokens/s are predicted for H100."
        ),
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    headings = ("devices", "re-\ncompute", "target", "module", "texts", "step", "peak", f"fits\n{device_gb:g} GB")
    for heading in (*headings, "most text\ntokens", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in planned:
        memory = one.memory
        step = memory.peak - memory.held
        parts = (memory.target, memory.weights + memory.optimizer, memory.texts, step, memory.peak)
        table.add_row(
            str(one.ranks),
            "yes" if one.recomputes else "no",
            *(f"{part / 1e9:.1f}" for part in parts),
            "yes" if one.fits else "no",
            f"{max(0, one.most_text_tokens):,}",
            f"{one.tokens_per_second:,.0f}",
        )
    return table
