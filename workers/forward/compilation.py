"""Compilation of a model's layers, and the warm-up that pays for it before anybody waits.

Not the model but its layer is compiled, once for all layers and all widths of a step: between the
opaque operators (attention, linear layers) the compiler joins what would be dozens of small passes over
the activations. That costs seconds instead of minutes, and what was compiled is kept in a directory:
the next start only looks it up.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from cluster.core.config import ModelSection
from workers.forward.replace_linear import decoder_layers


def should_compile(section: ModelSection) -> bool:
    """Whether `section.compile` asks for it: `auto` does where the step is bound by memory, not by arithmetic."""
    return section.compile == "on" or (section.compile == "auto" and section.dtype != "float32")


def compile_layers(model: PreTrainedModel, directory: str | None) -> None:
    """Let each decoder layer be compiled when it first runs; `directory` keeps the result for the next start."""
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        # The compiler asks the environment alone where to keep what it made.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", directory)
    layers = list(decoder_layers(model))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * count_layer_kinds(layers))
    for layer in layers:
        layer.compile(dynamic=True, fullgraph=True)


def undo_compile(model: PreTrainedModel) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


def count_layer_kinds(layers: list[nn.Module]) -> int:
    """How many different layers there are, as far as a compiler cares: by their attributes that are plain values."""
    seen = {
        tuple(
            (name, key, value)
            for name, module in layer.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key != "layer_idx"
        )
        for layer in layers
    }
    return max(1, len(seen))
