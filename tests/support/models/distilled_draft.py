"""A distilled draft of a tiny target in the format of `pilotfish distill`: layers without embedding and head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from workers.model.draft_card import CARD, EARLIER_CARD, VOCABULARY, WEIGHTS, DraftCard
from workers.model.weight_files import CONFIG, config_values


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


def stored_card(directory: Path) -> dict[str, Any]:
    """The card in a draft's `config.json`."""
    card: dict[str, Any] = config_values(directory)[CARD]
    return card


def change_card(directory: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of the card in a draft's `config.json`."""
    config = config_values(directory)
    (directory / CONFIG).write_text(json.dumps(config | {CARD: {**config[CARD], **changes}}))


def as_earlier_version(directory: Path) -> None:
    """Describe a draft as earlier versions did: the card is a file of its own, and modules have no configuration."""
    config = config_values(directory)
    (directory / EARLIER_CARD).write_text(json.dumps(config.pop(CARD)))
    if config["model_type"] == CARD:
        (directory / CONFIG).unlink()
    else:
        (directory / CONFIG).write_text(json.dumps(config))
