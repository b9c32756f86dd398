"""A Llama-like model whose whole forward pass is one call into the CPU kernels. See decoder.c.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from workers.forward.layout import RowShape
from workers.forward.linear import quantize
from workers.forward.loaded_model import PassOutput
from workers.forward.native.attention import KINDS, StepHeader, address, build_native_step
from workers.forward.native.build import load_library
from workers.forward.native.decoder_shape import DecoderShape, head_norms
from workers.forward.native.packed_linear import (
    INT8_TILES,
    block_columns,
    interleave,
    is_on_tiles,
    pack_blocks,
    pad_rows,
)
from workers.forward.native.structures import Decoder, DecoderLayer, Matrix, Pass
from workers.forward.partial_pass import WHOLE, PartialPass
from workers.forward.replace_linear import decoder_layers
from workers.kv.groups import KvCacheGroups
from workers.kv.huge_pages import CACHE_LINE, Arena, release_free_memory
from workers.kv.pool import KvPool

_LINE_FLOATS = CACHE_LINE // 4
_LEAST_ANGLES = 1024


class NativeDecoder:
    """The packed weights of a model, and the call into the kernels. Packing removes the weights from the model."""

    def __init__(
        self, model: Any, shape: DecoderShape, library: ctypes.CDLL, dtype: torch.dtype, quantization: str
    ) -> None:
        self._library = library
        self._decode = library.pilotfish_decode
        self._decode.argtypes = [ctypes.POINTER(Decoder), ctypes.POINTER(StepHeader), ctypes.POINTER(Pass)]
        self._decode.restype = None
        self._columns = block_columns(library)
        """Outputs per block of a packed matrix: two vector registers of this processor."""
        self._shape = shape
        self._dtype = dtype
        self._quantization = quantization
        self._vectors: list[torch.Tensor] = []
        """Vectors that the C structures point to."""
        stored = torch.int8 if quantization == "int8" else dtype
        self._arena = Arena(_packed_bytes(model, shape, stored, self._columns))
        self._rotary = model.model.rotary_emb
        embedding = model.model.embed_tokens.weight.detach()
        self._tokens = len(embedding)
        is_tied = embedding.data_ptr() == model.lm_head.weight.data_ptr() and stored is embedding.dtype
        # A head that is tied to the embedding serves as its table. Otherwise a copy does: the loaded tensor would keep
        # the whole weight file mapped.
        self._embedding = None if is_tied else embedding.clone()
        model.model.embed_tokens = nn.Identity()
        self._vocabulary = model.lm_head.out_features
        final = self._vector(model.model.norm.weight)
        layers = list(decoder_layers(model))
        self._layers = (DecoderLayer * len(layers))()
        for index, layer in enumerate(layers):
            self._layers[index] = self._pack_layer(layer)
            _free_weights(layer)
            release_free_memory()
        head = self._matrix(model.lm_head.weight, model.lm_head.bias)
        _free_weights(model.model.norm)
        model.model.layers = nn.ModuleList()
        model.lm_head = nn.Identity()
        self._decoder = Decoder(
            *(len(layers), shape.hidden, shape.heads, shape.kv_heads, shape.dim, shape.inner, KINDS[dtype]),
            *(shape.epsilon, shape.scale, self._layers, final, head),
        )
        if self._embedding is not None:
            self._decoder.embedding_kind = KINDS[self._embedding.dtype]
            self._decoder.embedding = self._embedding.data_ptr()
        self._kv_groups: KvCacheGroups | None = None
        self._angles: tuple[torch.Tensor, ...] = ()
        self._scratch = torch.empty(0)

    def bind(self, pool: KvPool) -> None:
        """See `NativeForward`."""
        self._kv_groups = pool.kv_groups
        for layer, placement in zip(self._layers, pool.kv_groups.placements, strict=True):
            layer.keys, layer.values = (
                pool.keys[placement.block_layer].data_ptr(),
                pool.values[placement.block_layer].data_ptr(),
            )
            layer.table, layer.window, layer.sinks = placement.table, placement.window.size or 0, placement.window.sinks

    def compute(
        self,
        tokens: Sequence[int],
        selected: Sequence[int],
        rows: Sequence[RowShape],
        taps: Sequence[int] = (),
        partial: PartialPass = WHOLE,
        inputs: torch.Tensor | None = None,
        leaders: int = 0,  # noqa: ARG002 - all logits are computed
    ) -> PassOutput:
        """See `NativeForward`. Raises `IndexError` for a token that the model does not have."""
        if self._kv_groups is None:
            raise RuntimeError("bind a pool before computing")
        step = build_native_step(rows, self._kv_groups)
        if inputs is None and not 0 <= min(tokens) <= max(tokens) < self._tokens:
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)}: the model has {self._tokens}")
        ids, indices, tapped = array("q", tokens), array("q", selected), array("q", taps)
        self._extend_angles(step.end)
        logits = torch.empty((len(indices), self._vocabulary))
        layers = partial.layers or len(self._layers)
        skip = array("B", partial.skipped_parts(len(self._layers)))
        exit_norm = None if partial.exit_norm is None else partial.exit_norm.float().contiguous()
        inputs = None if inputs is None else inputs.float().contiguous()
        hidden = torch.empty((len(ids), len(taps) * self._shape.hidden), dtype=torch.bfloat16) if taps else None
        work = Pass(
            *(address(ids), address(indices), len(indices), logits.data_ptr()),
            *self._work_buffers(len(ids), len(indices)),
            *(layers, address(skip) if skip else None),
            *(None if given is None else given.data_ptr() for given in (exit_norm, inputs)),
            *(address(tapped), len(taps), None if hidden is None else hidden.data_ptr()),
        )
        self._decode(ctypes.byref(self._decoder), ctypes.byref(step.header), ctypes.byref(work))
        return PassOutput(logits, hidden)

    def _extend_angles(self, length: int) -> None:
        """Extend the rotary cosines and sines, float32 `[positions, dim]`, to at least `length` positions."""
        if not self._angles or length > len(self._angles[0]):
            positions = torch.arange(max(_LEAST_ANGLES, 1 << (length - 1).bit_length()))[None]
            self._angles = tuple(part[0].contiguous() for part in self._rotary(torch.empty(1), positions))
            self._decoder.cos, self._decoder.sin = (part.data_ptr() for part in self._angles)

    def _work_buffers(self, tokens: int, wanted: int) -> list[int]:
        """Addresses of the buffers of `Pass` from `x` on. The next pass reuses them."""
        shape = self._shape
        queries, stored = shape.heads * shape.dim, shape.kv_heads * shape.dim
        widest = max(shape.hidden, queries)
        sizes = [tokens * shape.hidden, max(tokens, wanted) * widest, tokens * shape.inner]
        sizes += [tokens * (queries + 2 * stored), tokens * queries, tokens * stored, tokens * stored]
        offsets = [0, *accumulate(-(-size // _LINE_FLOATS) * _LINE_FLOATS for size in sizes)]
        if offsets[-1] > len(self._scratch):
            self._scratch = torch.empty(offsets[-1])
        base = self._scratch.data_ptr()
        return [base + 4 * offset for offset in offsets[:-1]]

    def _pack_layer(self, layer: Any) -> DecoderLayer:
        """Pack the weights of one layer."""
        attention, mlp = layer.self_attn, layer.mlp
        siblings = [attention.q_proj, attention.k_proj, attention.v_proj]
        qkv = torch.cat([projection.weight for projection in siblings])
        bias = None if siblings[0].bias is None else torch.cat([projection.bias for projection in siblings])
        norms = (layer.input_layernorm, layer.post_attention_layernorm, *(head_norms(attention)))
        return DecoderLayer(
            self._matrix(qkv, bias),
            self._matrix(attention.o_proj.weight, attention.o_proj.bias),
            self._matrix(interleave(mlp.gate_proj.weight, mlp.up_proj.weight, self._columns), self._biases(mlp)),
            self._matrix(mlp.down_proj.weight, mlp.down_proj.bias),
            *(None if norm is None else self._vector(norm.weight) for norm in norms),
        )

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        """Pack `[out, in]` weights."""
        scale = None
        outputs, inputs = weight.shape
        packed = weight.detach()
        if self._quantization == "int8":
            packed, scales = quantize(packed)
            scale = self._vector(pad_rows(scales.float(), self._columns))
        on_tiles = is_on_tiles(self._library, packed.dtype, inputs)
        packed = pack_blocks(packed, self._columns, self._arena, on_tiles=on_tiles)
        return Matrix(
            *(
                INT8_TILES if on_tiles else KINDS[packed.dtype],
                inputs,
                outputs,
                packed.shape[0],
                packed.data_ptr(),
                scale,
            ),
            None if bias is None else self._vector(pad_rows(bias, self._columns)),
        )

    def _biases(self, mlp: Any) -> torch.Tensor | None:
        if mlp.gate_proj.bias is None:
            return None
        return interleave(mlp.gate_proj.bias, mlp.up_proj.bias, self._columns)

    def _vector(self, values: torch.Tensor) -> int:
        kept = values.detach().float().contiguous().clone()
        self._vectors.append(kept)
        return kept.data_ptr()


def pack_decoder(
    model: Any, shape: DecoderShape, dtype: torch.dtype, quantization: str, directory: str | None
) -> NativeDecoder | None:
    """Pack the model's weights and remove them from it. Returns `None`, and changes nothing, without kernels."""
    library = load_library(directory)
    return None if library is None else NativeDecoder(model, shape, library, dtype, quantization)


def _packed_bytes(model: Any, shape: DecoderShape, dtype: torch.dtype, columns: int) -> int:
    """Bytes of all packed matrices, each padded to whole blocks and cache lines."""
    heads = (shape.heads + 2 * shape.kv_heads) * shape.dim
    gates = 2 * (shape.inner + -shape.inner % (columns // 2))
    layer = ((heads, shape.hidden), (shape.hidden, shape.heads * shape.dim), (gates, shape.hidden))
    matrices = [*layer, (shape.hidden, shape.inner)] * len(list(decoder_layers(model)))
    matrices.append((model.lm_head.out_features, shape.hidden))
    sizes = [(outputs + -outputs % columns) * inputs * dtype.itemsize for outputs, inputs in matrices]
    return sum(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes)


def _free_weights(layer: nn.Module) -> None:
    """Free the weights of a packed layer, so that memory never holds the model twice."""
    for module in layer.modules():
        module._parameters.clear()
