"""Families after GPT-2's first code: a method `_attn` multiplies queries, keys and values, and all else stays.

CodeGen, GPT, GPT-J, GPT-Neo with its local layers, GPT-NeoX-Japanese.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from workers.forward.adapters.base import attend, in_steps

_SCALES: dict[str, Callable[[Any], float]] = {
    "codegen": lambda module: 1 / float(module.scale_attn),
    "gpt_neo": lambda _: 1.0,
    "gpt_neox_japanese": lambda module: 1 / float(module.norm_factor),
    "gptj": lambda module: 1 / float(module.scale_attn),
}
"""What multiplies the products of queries and keys, by model type."""


def adapt(model: PreTrainedModel) -> None:
    """Let the method `_attn` of the attention modules call the paged attention."""
    layers = [part for part in model.modules() if hasattr(part, "_attn")]
    for layer, module in enumerate(layers):
        module.layer_idx = layer  # type: ignore[assignment]  # some call it otherwise, or do not count
        if model.config.model_type == "openai-gpt":
            in_steps(module, "_attn", _attend_as_gpt)
            continue
        is_local = getattr(module, "attention_type", None) == "local"
        window = int(model.config.window_size) if is_local else None
        in_steps(
            module, "_attn", partial(_attend, scaling=_SCALES[model.config.model_type](module), sliding_window=window)
        )


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    return attend(module, query, key, value, **options), None


def _attend_as_gpt(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> list[torch.Tensor]:
    return [attend(module, query, key.transpose(2, 3), value, scaling=None if module.scale else 1.0)]
