"""Converts a MarianMT checkpoint with pickled weights to safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

from cluster.core.errors import ModelLoadError

_WEIGHTS = "pytorch_model.bin"
_COPIED = ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json")
_TIED = frozenset({"lm_head.weight"})


def convert_marian(source: Path, destination: Path) -> None:
    """Write the model in `source` to `destination`: safetensors, configurations, and the tokenizer's files unchanged.

    Nothing but tensors is taken from the pickle. Raises `ModelLoadError`.
    """
    try:
        weights = torch.load(source / _WEIGHTS, map_location="cpu", weights_only=True)
        config = AutoConfig.from_pretrained(source)
        generation = GenerationConfig.from_pretrained(source)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        left = model.load_state_dict(weights, strict=False)
        if left.unexpected_keys or not _TIED.issuperset(left.missing_keys):
            raise ValueError(f"missing {left.missing_keys}, unexpected {left.unexpected_keys}")
        model.tie_weights()
        model.generation_config = generation
        model.save_pretrained(destination)
        for name in _COPIED:
            shutil.copyfile(source / name, destination / name)
    except Exception as error:  # the reader of a broken file may raise anything
        raise ModelLoadError(f"MarianMT checkpoint {str(source)!r} cannot be converted: {error}") from error
