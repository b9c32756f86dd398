"""Compiles a model's decoder layers.

All decoder layers share the code of one compiled layer, which serves all widths of a step. Between the opaque
operators (attention, linear layers) the compiler fuses dozens of small operations. This takes seconds instead of the
minutes of a whole model, and a directory keeps the result for the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from cluster.core.config.model_section import ModelSection
from workers.forward.code_folder import keep_compiled_code
from workers.forward.layer_lists import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def should_compile(section: ModelSection) -> bool:
    """Whether to compile. `auto` compiles unless the dtype is float32, in which arithmetic bounds the step."""
    return section.compile == "on" or (section.compile == "auto" and section.dtype != "float32")


def compile_layers(model: PreTrainedModel, directory: str | None) -> None:
    """Compile each decoder layer when it first runs. `directory` keeps the result for the next start."""
    keep_compiled_code(directory)
    layers = list(decoder_layers(model))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * count_layer_kinds(layers))
    for layer in layers:
        # Not `layer.compile`, which compiles the layer's hooks too: hooks read hidden states between the layers.
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True)


def undo_compile(model: PreTrainedModel) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        vars(layer).pop("forward", None)


def count_layer_kinds(layers: list[nn.Module]) -> int:
    """Number of layers that the compiler treats as different: those that differ in an attribute of a plain type."""
    seen = {
        tuple(
            (name, key, value)
            for name, module in layer.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key not in ("layer_idx", "kv_layer")
        )
        for layer in layers
    }
    return max(1, len(seen))
