"""Tiny hybrid models: some layers attend, the others keep a recurrent or convolutional state."""

from __future__ import annotations

from pathlib import Path

from tests.support.models import tiny
from tests.support.models.model_cases import ModelCase
from tests.zoo.configs import tiny_config

KINDS = ("qwen3_next", "falcon_h1", "lfm2")
"""One family of each kind: gated delta rule, Mamba-2 beside attention, short convolutions."""
OTHERS = ("qwen3_5_text", "nemotron_h", "granitemoehybrid", "jamba", "bamba", "lfm2_moe", "olmo_hybrid")


def save_hybrid(directory: Path, family: str, seed: int = 0) -> ModelCase:
    """Save a tiny hybrid model with random weights in `directory`."""
    config = tiny_config(family)
    config.tie_word_embeddings = False  # a random model with one matrix at both ends repeats its last token
    tiny.save(directory, config, seed=seed, sharpness=3.0)
    return ModelCase(directory)
