"""MPT: ALiBi, and projections that may be clipped. Its forward pass takes no positions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from workers.forward.adapters.base import attend, attention_modules, give_slopes, in_steps, is_paged, merged


def adapt(model: PreTrainedModel) -> None:
    """Let the attention modules call the paged attention."""
    decoder: Any = model.base_model
    biases = decoder.build_mpt_alibi_tensor(decoder.num_heads, 2)  # [heads, 1, positions −1 and 0]
    slopes = tuple((-biases[:, 0, 0]).tolist())
    for module in attention_modules(model):
        give_slopes(module, slopes)
        in_steps(module, "forward", _forward)
    decoder.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(decoder: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The decoder asks what mask it made, but nobody reads it in steps: it takes one of four dimensions as its own."""
    if is_paged(next(attention_modules(decoder))):
        named["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return arguments, named


def _forward(module: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        part.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=2)
    )
    attended = attend(module, query, key, value, scaling=module.softmax_scale, alibi_slopes=module.alibi_slopes)
    return module.out_proj(merged(attended)), None
