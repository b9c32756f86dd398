"""Initial weights of a drafting module: the decoder layers of a model, the target or a draft.

An EAGLE head with the layers of a draft that reads tokens starts as this draft. A block drafter needs keys and values
of the context from the target's hidden states instead: they are fitted to those of the draft by ridge regression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError, shorten
from workers.distill.modules.batches import TapBatch
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.layer import ContextProjection, DrafterLayer

_LAYER = re.compile(r"^.*\blayers\.(?P<number>\d+)\.(?P<name>.*)\.weight$")
_NAMES = {f"self_attn.{part}_proj": f"{part}_proj.weight" for part in "qkvo"}
_NAMES |= {f"mlp.{part}_proj": f"{part}_proj.weight" for part in ("gate", "up", "down")}
_NAMES |= {"post_attention_layernorm": "mlp_norm"}
_RIDGE = 1e-3
"""Relative to the mean squared feature."""


def copy_layers(module: BlockDrafter | EagleHead, source: Mapping[str, Tensor], layers: Sequence[int]) -> None:
    """Copy the Llama-like layers `layers` of a model's parameters into a module with as many layers.

    A final norm among the parameters is copied as well. Raises `ConfigurationError` where they do not fit.
    """
    if len(layers) != module.shape.layers:
        raise ConfigurationError(
            f"layers: {shorten(list(layers))} are refused; the module has {module.shape.layers} layers"
        )
    found: dict[str, Tensor] = {}
    for name, value in source.items():
        match = _LAYER.match(name)
        if match is None:
            if name.endswith("norm.weight"):
                found["output_norm"] = value
        elif int(match["number"]) in layers:
            place = layers.index(int(match["number"]))
            if match["name"] == "input_layernorm":
                found[f"input_norms.{place}"] = value
            elif match["name"] in _NAMES:
                found[f"layers.{place}.{_NAMES[match['name']]}"] = value
    own = module.state_dict()
    goals = {f"input_norms.{place}": own["input_norms"][place] for place in range(len(layers))}
    goals |= {
        f"layers.{place}.{part}": own[f"layers.{place}.{part}"]
        for place in range(len(layers))
        for part in _NAMES.values()
    }
    if "output_norm" in found:
        goals["output_norm"] = own["output_norm"]
    for name, goal in goals.items():
        if name not in found or found[name].shape != goal.shape:
            raise ConfigurationError(
                f"layers: {shorten(list(layers))} are refused; the model has no {name} of shape {list(goal.shape)}"
            )
        goal.copy_(found[name])


def fit_context(module: BlockDrafter, ends: TargetEnds, batches: Sequence[TapBatch]) -> None:
    """Fit the context's keys and values to those that the module's layers compute from tokens alone."""
    parts = [part for part in module.contexts if isinstance(part, ContextProjection)]
    layer = module.shape.layer
    width = module.fusion.taps * layer.hidden_size
    device = module.slots.device
    squares = torch.zeros(width, width, device=device)
    products = [torch.zeros(width, 2 * layer.kv_heads * layer.head_width, device=device) for _ in parts]
    with torch.no_grad():
        for batch in batches:
            states = _keys_values(module, ends, batch)
            is_token = torch.arange(batch.tokens.shape[1], device=device) < batch.lengths.unsqueeze(1)
            features = module.fusion.normalised(batch.taps.float())[is_token]
            squares += features.T @ features
            for product, state in zip(products, states, strict=True):
                product += features.T @ state[is_token]
        squares.diagonal().add_(_RIDGE * squares.diagonal().mean())
        for part, product in zip(parts, products, strict=True):
            keys, values = torch.linalg.solve(squares, product).T.chunk(2)
            part.k_proj.weight.copy_(keys)
            part.v_proj.weight.copy_(values)


def _keys_values(module: BlockDrafter, ends: TargetEnds, batch: TapBatch) -> list[Tensor]:
    """Keys before rotation and values of each layer, [rows, length, 2 x KV heads x head width], from tokens alone."""
    states = ends.embed(batch.tokens).float()
    places = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
    mask = places.unsqueeze(1) <= places.unsqueeze(2)
    found = []
    for number, layer in enumerate(module.layers):
        if not isinstance(layer, DrafterLayer):
            continue
        inputs = rms_norm(states, module.input_norms[number], module.shape.layer.norm_epsilon)
        found.append(torch.cat([layer.k_proj(inputs), layer.v_proj(inputs)], dim=-1))
        keys, values = layer.keys_values(inputs, places)
        states = layer.outputs(states, layer.queries(inputs, places), keys, values, mask)
    return found
