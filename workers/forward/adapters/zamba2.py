"""Zamba2: several layers share one attention module, and each has keys and values of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from workers.forward.adapters.base import attention_modules


def adapt(model: PreTrainedModel) -> None:
    """Give each call of a shared module the number of the layer that calls it, and its place in the pool."""
    places = {layer: place for place, layer in enumerate(sorted(model.config.hybrid_layer_ids))}

    def number(module: Any, _: Any, named: dict[str, Any]) -> None:
        module.layer_idx, module.kv_layer = named["layer_idx"], places[named["layer_idx"]]

    for module in attention_modules(model):
        module.register_forward_pre_hook(number, with_kwargs=True)
