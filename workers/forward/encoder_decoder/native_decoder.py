"""The decoder of Marian and BART whose whole forward pass is one call into the CPU kernels. See sourced_decoder.c.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from cluster.core.errors import ConfigurationError
from workers.forward.encoder_decoder.source_layout import build_native_source_step
from workers.forward.layout import RowShape
from workers.forward.loaded_model import PassOutput
from workers.forward.native.attention import KINDS, MOST_DIM, StepHeader, build_native_step
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedMatrix, block_columns, stored_as
from workers.forward.native.structures import Norm, SourcedDecoder, SourcedLayer, SourcedPass
from workers.forward.partial_pass import WHOLE, PartialPass
from workers.forward.replace_linear import decoder_layers
from workers.kv.groups import KvCacheGroups
from workers.kv.huge_pages import CACHE_LINE, Arena
from workers.kv.pool import KvPool

_PARTS = {"self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm", "fc1", "fc2"}
_PARTS |= {"final_layer_norm"}
_OUTER_PARTS = {"embed_tokens", "embed_positions", "layers", "layernorm_embedding"}
_ACTIVATIONS = {"swish": 0, "silu": 0, "relu": 1, "gelu": 2}
_LINE_FLOATS = CACHE_LINE // 4


@dataclass(frozen=True, slots=True)
class SourcedShape:
    """The dimensions that all layers share."""

    hidden: int
    heads: int
    inner: int
    activation: int
    epsilon: float
    embedding_scale: float


class NativeSourcedDecoder:
    """The packed weights of a decoder, and the call into the kernels. Packing removes the layers from the model."""

    def __init__(
        self, model: Any, shape: SourcedShape, library: ctypes.CDLL, dtype: torch.dtype, quantization: str
    ) -> None:
        self._decode = library.pilotfish_decode_sourced
        self._decode.argtypes = [
            ctypes.POINTER(SourcedDecoder),
            *[ctypes.POINTER(StepHeader)] * 2,
            ctypes.POINTER(SourcedPass),
        ]
        self._decode.restype = None
        self._columns = block_columns(library)
        self._shape = shape
        self._stored = torch.int8 if quantization == "int8" else dtype
        self._kept: list[PackedMatrix | torch.Tensor] = []
        """What the C structures point to."""
        decoder = model.decoder
        layers = list(decoder_layers(model))
        self._arena = Arena(_packed_bytes([*layers, model.lm_head], self._stored, self._columns))
        self._layers = (SourcedLayer * len(layers))(*map(self._pack_layer, layers))
        self._embedding = decoder.embed_tokens.weight.detach().contiguous()
        positions, offset = decoder.embed_positions.weight.detach().float(), decoder.embed_positions.offset
        self._positions = positions[offset:].contiguous()
        self._vocabulary = int(model.lm_head.weight.shape[0])
        self._decoder = SourcedDecoder(
            *(len(layers), shape.hidden, shape.heads, shape.hidden // shape.heads, shape.inner, KINDS[dtype]),
            *(shape.activation, shape.epsilon, (shape.hidden // shape.heads) ** -0.5, shape.embedding_scale),
            *(self._layers, self._matrix(model.lm_head.weight, _head_bias(model))),
            *(KINDS[self._embedding.dtype], self._embedding.data_ptr(), self._positions.data_ptr()),
            self._norm(getattr(decoder, "layernorm_embedding", None)),
        )
        decoder.layers = nn.ModuleList()
        model.lm_head = nn.Identity()
        self._kv_groups: KvCacheGroups | None = None
        self._scratch = torch.empty(0)

    def bind(self, pool: KvPool) -> None:
        """See `NativeForward`."""
        self._kv_groups = pool.kv_groups
        for layer, placement in zip(self._layers, pool.kv_groups.placements, strict=True):
            layer.keys = pool.keys[placement.block_layer].data_ptr()
            layer.values = pool.values[placement.block_layer].data_ptr()
            layer.table = placement.table

    def compute(
        self,
        tokens: Sequence[int],
        selected: Sequence[int],
        rows: Sequence[RowShape],
        taps: Sequence[int] = (),
        partial: PartialPass = WHOLE,
        inputs: torch.Tensor | None = None,
    ) -> PassOutput:
        """See `NativeForward`.

        Raises `IndexError` for a token that the model does not have, `ConfigurationError` for `inputs`, which no
        method gives to such a model, and for a norm after a part of the layers, since the decoder has no final norm.
        """
        if self._kv_groups is None:
            raise RuntimeError("bind a pool before computing")
        if partial.exit_norm is not None:
            raise ConfigurationError("exit_norm is refused: this decoder has no norm after its last layer")
        if inputs is not None:
            raise ConfigurationError("inputs are refused: the decoder of an encoder-decoder model reads tokens")
        step, sources = build_native_step(rows, self._kv_groups), build_native_source_step(rows, self._kv_groups)
        ids, indices = np.array(tokens, dtype=np.int64), np.array(selected, dtype=np.int64)
        if not 0 <= ids.min() <= ids.max() < len(self._embedding):
            raise IndexError(f"tokens {ids.min()} to {ids.max()}: the model has {len(self._embedding)}")
        logits = torch.empty((len(indices), self._vocabulary))
        skip = np.array(partial.skipped_parts(len(self._layers)), dtype=np.uint8)
        tapped = np.array(taps, dtype=np.int64)
        hidden = torch.empty((len(ids), len(taps) * self._shape.hidden), dtype=torch.bfloat16) if taps else None
        work = SourcedPass(
            *(array.ctypes.data for array in (ids, indices)),
            *(len(indices), logits.data_ptr()),
            *self._work_buffers(max(len(ids), len(indices))),
            *(partial.layers or len(self._layers), skip.ctypes.data if len(skip) else None),
            *(tapped.ctypes.data, len(taps), None if hidden is None else hidden.data_ptr()),
        )
        headers = (ctypes.byref(step.header), ctypes.byref(sources.header))
        self._decode(ctypes.byref(self._decoder), *headers, ctypes.byref(work))
        return PassOutput(logits, hidden)

    def _work_buffers(self, tokens: int) -> list[int]:
        """Addresses of the buffers of `SourcedPass` from `x` on. The next pass reuses them."""
        hidden, inner = self._shape.hidden, self._shape.inner
        sizes = [tokens * width for width in (hidden, hidden, inner, inner, 3 * hidden, hidden, hidden)]
        offsets = [0, *accumulate(-(-size // _LINE_FLOATS) * _LINE_FLOATS for size in sizes)]
        if offsets[-1] > len(self._scratch):
            self._scratch = torch.empty(offsets[-1])
        base = self._scratch.data_ptr()
        return [base + 4 * offset for offset in offsets[:-1]]

    def _pack_layer(self, layer: Any) -> SourcedLayer:
        own, source = layer.self_attn, layer.encoder_attn
        siblings = (own.q_proj, own.k_proj, own.v_proj)
        bias = None if own.q_proj.bias is None else torch.cat([projection.bias for projection in siblings])
        pairs = [(torch.cat([projection.weight for projection in siblings]), bias)]
        linears = (own.out_proj, source.q_proj, source.out_proj, layer.fc1, layer.fc2)
        pairs += [(linear.weight, linear.bias) for linear in linears]
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        return SourcedLayer(*(self._matrix(*pair) for pair in pairs), *map(self._norm, norms))

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        own_bias = None if bias is None else bias.detach().float()
        packed = PackedMatrix(*stored_as(weight, self._stored), own_bias, self._columns, self._arena)
        self._kept.append(packed)
        return packed.matrix

    def _norm(self, norm: Any) -> Norm:
        if norm is None:
            return Norm(None, None)
        values = [part.detach().float().clone() for part in (norm.weight, norm.bias)]
        self._kept += values
        return Norm(*(value.data_ptr() for value in values))


def _packed_bytes(parts: Sequence[nn.Module], dtype: torch.dtype, columns: int) -> int:
    """Enough bytes for the packed linear layers of these parts, each padded to whole blocks and cache lines."""
    linears = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    sizes = [-(-linear.out_features // columns) * columns * linear.in_features for linear in linears]
    return sum(size * dtype.itemsize + CACHE_LINE for size in sizes)


def _head_bias(model: Any) -> torch.Tensor | None:
    """The biases of the logits: those of the head, and those of the model."""
    found = [part.detach().float().flatten() for part in (model.lm_head.bias, model.logits_bias) if part is not None]
    return sum(found[1:], found[0]) if found else None


def pack_sourced_decoder(
    model: Any, dtype: torch.dtype, quantization: str, directory: str | None
) -> NativeSourcedDecoder | None:
    """Pack the weights of a `SourcedDecoder` and remove its layers. `None`, and no change, where that is impossible."""
    shape = sourced_shape(model, dtype)
    library = None if shape is None else load_library(directory)
    return (
        None if shape is None or library is None else NativeSourcedDecoder(model, shape, library, dtype, quantization)
    )


def sourced_shape(model: Any, dtype: torch.dtype) -> SourcedShape | None:
    """The shape of a decoder that the kernels may compute, or `None` if they do not support it.

    The check covers the model's parts, not what they compute. The caller must compare the logits of both.
    """
    decoder, layers = getattr(model, "decoder", None), list(decoder_layers(model))
    activation = _ACTIVATIONS.get(str(getattr(model.config, "activation_function", "")))
    children = {name for name, _ in decoder.named_children()} if isinstance(decoder, nn.Module) else set()
    if dtype not in (torch.float32, torch.bfloat16) or activation is None or not children <= _OUTER_PARTS or not layers:
        return None
    if not {"embed_tokens", "embed_positions"} <= children or type(model.lm_head) is not nn.Linear or model.scale:
        return None
    shapes = {_shape_of(layer, activation, decoder) for layer in layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None or shape.hidden % shape.heads or shape.hidden // shape.heads > MOST_DIM:
        return None
    return None if shape.hidden % 2 or shape.inner % 2 else shape


def _shape_of(layer: Any, activation: int, decoder: Any) -> SourcedShape | None:
    parts = {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
    if parts != _PARTS:
        return None
    own, source = layer.self_attn, layer.encoder_attn
    linears = [getattr(own, name, None) for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    linears += [source.q_proj, source.out_proj, layer.fc1, layer.fc2]
    if any(type(linear) is not nn.Linear for linear in linears) or own.q_proj.in_features != own.q_proj.out_features:
        return None
    scales = (getattr(owner, "embed_scale", 1.0) for owner in (decoder, decoder.embed_tokens))
    scale = next((float(found) for found in scales if float(found) != 1.0), 1.0)
    heads, hidden = int(own.num_heads), int(own.q_proj.in_features)
    return SourcedShape(
        hidden, heads, int(layer.fc1.out_features), activation, float(layer.final_layer_norm.eps), scale
    )
