"""Falcon: rotary positions or ALiBi; one KV head, as many as query heads, or groups (the "new decoder")."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.forward.adapters.base import alibi_slopes, attend, attention_modules, give_slopes, in_steps, merged


def adapt(model: PreTrainedModel) -> None:
    """Let the attention modules call the paged attention, and make all linear layers usual ones."""
    for part in model.modules():
        if type(part).__name__ == "FalconLinear":  # it rounds the product before it adds the bias
            part.__class__ = nn.Linear
    make = sys.modules[type(model).__module__].build_alibi_tensor
    slopes = alibi_slopes(model.config.num_attention_heads, make)
    for module in attention_modules(model):
        give_slopes(module, tuple(slope * module.inv_norm_factor for slope in slopes))  # it scales them, too
        in_steps(module, "forward", _forward)


def _forward(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (part.transpose(1, 2) for part in _heads(module, module.query_key_value(hidden_states)))
    if alibi is not None:
        attended = attend(module, query, key, value, alibi_slopes=module.alibi_slopes)
    else:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *(position_embeddings or ()))
        attended = attend(module, query, key, value, attention_mask)
    return module.dense(merged(attended)), None


def _heads(module: Any, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, `[1, tokens, heads, dim]`. The module itself would repeat the keys of a group."""
    if not module.new_decoder_architecture:
        query, key, value = module._split_heads(fused)
        return query, key, value
    shared = module.num_heads // module.num_kv_heads
    grouped = fused.view(*fused.shape[:2], module.num_kv_heads, shared + 2, module.head_dim)
    return grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
