"""Recognizes the models whose whole forward pass the CPU kernels can compute.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.forward.layer_lists import decoder_layers
from workers.forward.native.attention import MOST_DIM, MOST_VECTORS
from workers.forward.weights.modules import LINEAR_TYPES, StoredLinear

_CHANGING_ROTATIONS = {"dynamic", "longrope"}
"""Rotary embeddings whose angles depend on the longest sequence in a step."""
_UNSUPPORTED_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's multipliers that the kernels do not apply. They do apply `attention_multiplier`, the attention scale."""
_POSITIONS = "position_ids"
"""An attention that takes these does more with a position than to rotate by it: Ministral 3 scales far queries."""
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The dimensions that all layers share."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    epsilon: float
    scale: float


def supported_shape(model: Any, dtype: torch.dtype) -> DecoderShape | None:
    """The shape of a model that the kernels may compute, or `None` if they do not support it.

    The check covers the model's parts, not what they compute. The caller must compare the logits of both.
    """
    base, layers = getattr(model, "model", None), list(decoder_layers(model))
    wanted = ("embed_tokens", "rotary_emb", "norm", "layers")
    if dtype not in (torch.float32, torch.bfloat16) or not layers or any(not hasattr(base, name) for name in wanted):
        return None
    rotation = getattr(getattr(base, "rotary_emb", None), "rope_type", "default")
    if not isinstance(rotation, str) or rotation in _CHANGING_ROTATIONS:  # some have one for each kind of layer
        return None
    if any(getattr(model.config, name, None) not in (None, 1) for name in _UNSUPPORTED_MULTIPLIERS):
        return None
    is_gated_by_silu = getattr(model.config, "hidden_act", None) in ("silu", "swish")
    if not is_gated_by_silu or type(getattr(model, "lm_head", None)) not in LINEAR_TYPES:
        return None
    shapes = {_shape_of(layer) for layer in layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None or shape.dim > MOST_DIM or shape.heads > MOST_VECTORS * shape.kv_heads or shape.dim % 2:
        return None
    return shape if all(width % 2 == 0 for width in (shape.hidden, shape.inner, shape.heads * shape.dim)) else None


def _shape_of(layer: Any) -> DecoderShape | None:
    if {name for name, _ in layer.named_children()} != _PARTS:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if _POSITIONS in inspect.signature(type(attention).forward).parameters:
        return None
    parts = {name: child for name, child in attention.named_children() if not _is_trivial(child)}
    linears: list[Any] = [parts.get(name) for name in sorted(_ATTENTION)]
    linears += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *filter(None, head_norms(attention))]
    if not parts.keys() <= _ATTENTION | {"q_norm", "k_norm"} or any(
        type(linear) not in LINEAR_TYPES for linear in linears
    ):
        return None
    if any(not hasattr(norm, "variance_epsilon") for norm in norms):
        return None
    packed = {id(norm.weight) for norm in norms} | {id(one) for linear in linears for one in linear.parameters()}
    if any(id(one) not in packed for one in layer.parameters()):  # as learned sinks
        return None
    dim = int(attention.head_dim)
    if any(norm is not None and norm.weight.shape != (dim,) for norm in head_norms(attention)):
        return None
    epsilons = {float(norm.variance_epsilon) for norm in norms}
    biases = [attention.q_proj.bias is None, attention.k_proj.bias is None, attention.v_proj.bias is None]
    if len(epsilons) > 1 or len(set(biases)) > 1 or (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
        return None
    return DecoderShape(
        hidden=attention.q_proj.in_features,
        heads=attention.q_proj.out_features // dim,
        kv_heads=attention.k_proj.out_features // dim,
        dim=dim,
        inner=mlp.gate_proj.out_features,
        epsilon=epsilons.pop(),
        scale=float(attention.scaling),
    )


def _is_trivial(module: nn.Module) -> bool:
    return not isinstance(module, StoredLinear) and not any(True for _ in module.parameters())


def head_norms(attention: Any) -> tuple[Any, Any]:
    """The norms of each head's queries and keys, `None` where the model has none."""
    return getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
