"""Packs the weights of encoder-decoder models for the CPU kernels. See sourced_decoder.c.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.forward.native.attention import KINDS, MOST_DIM, StepHeader
from workers.forward.native.packed_linear import PackedMatrix, kernel_layout
from workers.forward.native.structures import Norm, SourcedDecoder, SourcedLayer, SourcedPass
from workers.forward.weights.choice import quantized_type, stored_as
from workers.kv.huge_pages import Arena

_ACTIVATIONS = {"swish": 0, "silu": 0, "relu": 1, "gelu": 2}
"""Activations of the kernels, by their names in `transformers`."""
_NEEDED_PARTS = {"embed_tokens", "embed_positions", "layers"}


@dataclass(frozen=True, slots=True)
class SourcedShape:
    """The dimensions that all layers of a decoder or an encoder share."""

    hidden: int
    heads: int
    inner: int
    activation: int
    epsilon: float
    embedding_scale: float


class SourcedPacker:
    """Packs matrices and norms, and keeps what the C structures point to."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, quantization: str) -> None:
        self._layout = kernel_layout(library)
        self._stored = quantized_type(quantization, dtype)
        self._arena = Arena()
        self._kept: list[PackedMatrix | torch.Tensor] = []

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """The C structure of a packed matrix `[out, in]` with a bias `[out]`."""
        packed = PackedMatrix(stored_as(weight, self._stored), bias, self._layout, self._arena)
        self._kept.append(packed)
        return packed.matrix

    def norm(self, norm: Any) -> Norm:
        """The C structure of a layer norm; one without weights for `None`."""
        if norm is None:
            return Norm(None, None)
        values = [part.detach().float().clone() for part in (norm.weight, norm.bias)]
        self._kept += values
        return Norm(*(value.data_ptr() for value in values))

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """A contiguous table that the C structures may point to."""
        values = values.detach().contiguous()
        self._kept.append(values)
        return values

    def stack(
        self, part: Any, shape: SourcedShape, layers: ctypes.Array[SourcedLayer], head: Any, kv_kind: torch.dtype
    ) -> SourcedDecoder:
        """The C structure of `part`, a decoder or an encoder: its packed `layers`, its embeddings and `head`."""
        dim, embedding = shape.hidden // shape.heads, self.table(part.embed_tokens.weight)
        return SourcedDecoder(
            *(len(layers), shape.hidden, shape.heads, dim, shape.inner, KINDS[kv_kind]),
            *(shape.activation, shape.epsilon, dim**-0.5, shape.embedding_scale, layers, head),
            *(KINDS[embedding.dtype], embedding.data_ptr(), self.table(_position_table(part)).data_ptr()),
            self.norm(getattr(part, "layernorm_embedding", None)),
        )


def sourced_function(library: ctypes.CDLL) -> Any:
    """The kernel that computes a `SourcedDecoder`."""
    function = library.pilotfish_decode_sourced
    function.argtypes = [ctypes.POINTER(SourcedDecoder), *[ctypes.POINTER(StepHeader)] * 2, ctypes.POINTER(SourcedPass)]
    function.restype = None
    return function


def buffer_sizes(shape: SourcedShape, tokens: int) -> list[int]:
    """Numbers in each of the buffers of `SourcedPass` from `x` to `value`."""
    hidden, inner = shape.hidden, shape.inner
    return [tokens * width for width in (hidden, hidden, inner, inner, 3 * hidden, hidden, hidden)]


def attention_matrices(packer: SourcedPacker, attention: Any) -> tuple[Any, Any]:
    """The packed projections of self-attention: queries, keys and values as one matrix, then that of the output."""
    siblings = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = None if siblings[0].bias is None else torch.cat([projection.bias for projection in siblings])
    qkv = packer.matrix(torch.cat([projection.weight for projection in siblings]), bias)
    return qkv, packer.matrix(attention.out_proj.weight, attention.out_proj.bias)


def _position_table(part: Any) -> torch.Tensor:
    """The position embeddings of a decoder or an encoder, float32 `[positions, hidden]`, that of position 0 first."""
    offset = int(getattr(part.embed_positions, "offset", 0))
    positions: torch.Tensor = part.embed_positions.weight.detach().float()[offset:]
    return positions.contiguous()


def shape_of_part(part: Any, activation: object, parts: set[str]) -> SourcedShape | None:
    """The shape of `part`, a decoder or an encoder; `None` if the kernels do not support it.

    `parts` are the names of what has weights in each of its layers. The check covers the names and sizes of parts, not
    what they compute.
    """
    kind = _ACTIVATIONS.get(str(activation))
    children = {name for name, _ in part.named_children()} if isinstance(part, nn.Module) else set()
    if kind is None or not _NEEDED_PARTS <= children <= _NEEDED_PARTS | {"layernorm_embedding"}:
        return None
    shapes = {_shape_of_layer(layer, kind, part) if _with_weights(layer) == parts else None for layer in part.layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None or shape.hidden % shape.heads or shape.hidden // shape.heads > MOST_DIM:
        return None
    return None if shape.hidden % 2 or shape.inner % 2 else shape


def _shape_of_layer(layer: Any, activation: int, part: Any) -> SourcedShape | None:
    own, source = layer.self_attn, getattr(layer, "encoder_attn", None)
    linears = [getattr(own, name, None) for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    linears += [layer.fc1, layer.fc2] if source is None else [layer.fc1, layer.fc2, source.q_proj, source.out_proj]
    if any(type(linear) is not nn.Linear for linear in linears) or own.q_proj.in_features != own.q_proj.out_features:
        return None
    scales = (getattr(owner, "embed_scale", 1.0) for owner in (part, part.embed_tokens))
    scale = next((float(found) for found in scales if float(found) != 1.0), 1.0)
    heads, hidden = int(own.num_heads), int(own.q_proj.in_features)
    return SourcedShape(
        hidden, heads, int(layer.fc1.out_features), activation, float(layer.final_layer_norm.eps), scale
    )


def _with_weights(layer: Any) -> set[str]:
    """Names of a layer's parts that have parameters."""
    return {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
