"""XGLM: projections as BART's, multiplied by code of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from workers.forward.adapters.base import attend, attention_modules, in_steps, merged


def adapt(model: PreTrainedModel) -> None:
    """Let the attention modules call the paged attention."""
    for module in attention_modules(model):
        in_steps(module, "forward", _forward)


def _forward(
    module: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = (
        project(hidden_states).unflatten(2, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    return module.out_proj(merged(attend(module, query, key, value, attention_mask, scaling=module.scaling))), None
