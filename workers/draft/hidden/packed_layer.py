"""One layer of a drafting module for serving: packed products, merged projections, norms folded into the weights.

Vectors between products are float32. An RMS norm's weights are part of the product after it, so a norm only scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from workers.draft.parallel.product import Product, make_product
from workers.draft.parallel.settings import Weights
from workers.forward.native.packed_layer import OutputWeights, PackedLayerOutput
from workers.model.drafting.layer import DrafterLayer

_DTYPES = {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def folded_product(weight: Tensor, weights: Weights, norm: Tensor | None = None) -> Product:
    """The product with `weight` [out, in]. `norm` [in] are the weights of a norm before it."""
    return make_product(weight if norm is None else weight.detach().float() * norm.detach().float(), weights)


def scaled(x: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, without weights."""
    return functional.rms_norm(x, (x.shape[-1],), None, epsilon)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions of some tokens. Both are [tokens, 1, head width]; the first half of `sine` is negated."""

    cosine: Tensor
    sine: Tensor

    def apply(self, states: Tensor) -> Tensor:
        """Rotate [tokens, heads, head width], halves paired as in Llama."""
        return states * self.cosine + states.roll(states.shape[-1] // 2, dims=-1) * self.sine


class RotaryTable:
    """Computes rotations for positions."""

    def __init__(self, width: int, theta: float, device: torch.device) -> None:
        half = width // 2
        self._steps = theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of positions, integers [tokens]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._steps
        cosine, sine = angles.cos(), angles.sin()
        return Rotation(torch.cat([cosine, cosine], dim=-1).unsqueeze(1), torch.cat([-sine, sine], dim=-1).unsqueeze(1))


class PackedLayer:
    """A `DrafterLayer` whose queries, keys and values come from one product of the residual."""

    def __init__(self, layer: DrafterLayer, input_norm: Tensor, weights: Weights) -> None:
        shape = layer.shape
        self._epsilon = shape.norm_epsilon
        self._heads, self._kv_heads, self._width = shape.heads, shape.kv_heads, shape.head_width
        merged = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
        self._joined = folded_product(merged, weights, input_norm)
        self._output = _layer_output(layer, weights)

    def project(self, residual: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, head width], keys and values [tokens, KV heads, head width], rotated."""
        joined = self._joined(scaled(residual, self._epsilon)).view(len(residual), -1, self._width)
        rotated = rotation.apply(joined[:, : self._heads + self._kv_heads])
        return rotated[:, : self._heads], rotated[:, self._heads :], joined[:, self._heads + self._kv_heads :]

    def output(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The residual [tokens, hidden size] after the layer; `attended` [tokens, heads × head width]."""
        return self._output(residual, attended)


def _layer_output(layer: DrafterLayer, weights: Weights) -> Callable[[Tensor, Tensor], Tensor]:
    """Maps the residual and what was attended to, to the residual after the layer."""
    epsilon = layer.shape.norm_epsilon
    if layer.o_proj.weight.device.type == "cpu":
        parts = (layer.o_proj.weight, layer.mlp_norm, layer.gate_proj.weight, layer.up_proj.weight)
        return PackedLayerOutput(OutputWeights(*parts, layer.down_proj.weight, epsilon), _DTYPES[weights]).apply
    out, down = make_product(layer.o_proj.weight, weights), make_product(layer.down_proj.weight, weights)
    gate_up = folded_product(torch.cat([layer.gate_proj.weight, layer.up_proj.weight]), weights, layer.mlp_norm)

    def output(residual: Tensor, attended: Tensor) -> Tensor:
        residual = residual + out(attended)
        gate, up = gate_up(scaled(residual, epsilon)).chunk(2, dim=-1)
        return residual + down(functional.silu(gate) * up)

    return output


def attend(queries: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor | None) -> Tensor:
    """Attention of one row: queries [tokens, heads, head width] → [tokens, heads × head width].

    `keys` and `values` are [KV heads, context, head width]. `is_seen`, bool, is [context] or [tokens, context]; `None`
    if everything is seen. Every token must see something.
    """
    tokens, heads, width = queries.shape
    group = heads // len(keys)
    folded = queries.view(tokens, len(keys), group * width).transpose(0, 1)  # [KV heads, tokens, group × width]
    folded = folded.reshape(1, len(keys), tokens * group, width)
    if is_seen is not None and is_seen.dim() == 2:
        is_seen = is_seen.repeat_interleave(group, dim=0)
    mask = None if is_seen is None else is_seen.expand(1, 1, tokens * group, -1)
    found = functional.scaled_dot_product_attention(folded, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask)
    return found.view(len(keys), tokens, group * width).transpose(0, 1).reshape(tokens, heads * width)
