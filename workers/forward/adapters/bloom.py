"""BLOOM: ALiBi, and a projection whose outputs alternate by heads. Its forward pass takes no positions."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.forward.adapters.base import alibi_slopes, attend, attention_modules, give_slopes, in_steps, merged


def adapt(model: PreTrainedModel) -> None:
    """Let the attention modules call the paged attention, and take the usual function for the same activation."""
    for part in model.modules():
        if hasattr(part, "gelu_impl"):
            part.gelu_impl = nn.GELU(approximate="tanh")
    slopes = alibi_slopes(model.config.n_head, sys.modules[type(model).__module__].build_alibi_tensor)
    for module in attention_modules(model):
        give_slopes(module, slopes)
        in_steps(module, "forward", _forward)


def _forward(module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    attended = attend(module, query, key, value, scaling=module.inv_norm_factor, alibi_slopes=module.alibi_slopes)
    return module.dense(merged(attended)) + residual, None
