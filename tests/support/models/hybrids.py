"""Tiny models with layers that keep a recurrent or convolutional state; in most, others attend."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.models import tiny
from tests.support.models.model_cases import ModelCase
from tests.zoo.configs import tiny_config
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool

KINDS = ("qwen3_next", "falcon_h1", "lfm2")
"""One family of each kind: gated delta rule, Mamba-2 beside attention, short convolutions."""
OTHERS = (
    "qwen3_5_text",
    "nemotron_h",
    "granitemoehybrid",
    "jamba",
    "bamba",
    "lfm2_moe",
    "olmo_hybrid",
    "mamba",
    "mamba2",
)


_SEEDS = {"jamba": 0}
"""Seeds of weights with which a model does not repeat one token; 1 elsewhere."""


def save_hybrid(directory: Path, family: str, **changes: int) -> ModelCase:
    """Save a tiny hybrid model with random weights in `directory`. `changes` are those of its configuration."""
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    if not hasattr(config, "max_position_embeddings"):  # without attention, nothing bounds a sequence
        config.max_position_embeddings = 128
    config.tie_word_embeddings = False  # a random model with one matrix at both ends repeats its last token
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, name) and name not in changes:
            setattr(config, name, 64)  # activations of torch have the same bits in any batch at whole vectors only
    tiny.save(directory, config, seed=_SEEDS.get(family, 1), sharpness=3.0)
    return ModelCase(directory)


def committed_parts(pool: KvPool, table: BlockTable) -> list[torch.Tensor]:
    """The parts of a sequence's committed state, of all layers."""
    assert pool.states is not None
    layers = sorted(pool.states.slots.layers.items())
    return [part[table.states.committed] for _, parts in layers for part in parts]
