"""A distilled draft of a tiny target in the format of `pilotfish distill`: layers without embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from workers.model.draft_card import VOCABULARY, WEIGHTS, DraftCard


def save(
    target: Path, directory: Path, layers: Sequence[int] = (0, 1), vocabulary: Sequence[int] | None = None
) -> Path:
    """Copy `layers` of the Llama-like model in `target`; `vocabulary` lists the tokens that the draft can propose."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = len(layers)
    weights = load_file(target / WEIGHTS)
    own = {"model.norm.weight": weights["model.norm.weight"]}
    for place, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name, values in weights.items():
            if name.startswith(prefix):
                own[f"model.layers.{place}.{name.removeprefix(prefix)}"] = values
    if vocabulary is not None:
        own[VOCABULARY] = torch.tensor(vocabulary, dtype=torch.int32)
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    save_file({name: values.contiguous() for name, values in own.items()}, directory / WEIGHTS)
    size = None if vocabulary is None else len(vocabulary)
    DraftCard(target.name, config.vocab_size, config.hidden_size, tuple(layers), size).write(directory)
    return directory
