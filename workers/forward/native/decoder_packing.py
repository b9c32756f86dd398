"""Packs a Llama-like model's weights for the CPU kernels, with the C structures that point to them. See decoder.c.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from workers.forward.linear import quantize
from workers.forward.native.attention import KINDS
from workers.forward.native.build import load_library
from workers.forward.native.decoder import NativeDecoder, PackedDecoder
from workers.forward.native.decoder_shape import DecoderShape, head_norms
from workers.forward.native.packed_linear import (
    INT8_TILES,
    block_columns,
    interleave,
    is_on_tiles,
    pack_blocks,
    pad_rows,
)
from workers.forward.native.structures import DecoderLayer, Matrix
from workers.forward.replace_linear import decoder_layers
from workers.kv.huge_pages import CACHE_LINE, Arena, release_free_memory


def pack_decoder(
    model: Any, shape: DecoderShape, dtype: torch.dtype, quantization: str, directory: str | None
) -> NativeDecoder | None:
    """Pack the model's weights and remove them from it. Returns `None`, and changes nothing, without kernels."""
    library = load_library(directory)
    if library is None:
        return None
    return NativeDecoder(_Packer(model, shape, library, dtype, quantization).pack(model), library)


class _Packer:
    """Packs the weights of one model."""

    def __init__(
        self, model: Any, shape: DecoderShape, library: ctypes.CDLL, dtype: torch.dtype, quantization: str
    ) -> None:
        self._library = library
        self._columns = block_columns(library)
        """Outputs per block of a packed matrix: two vector registers of this processor."""
        self._shape = shape
        self._dtype = dtype
        self._quantization = quantization
        self._vectors: list[torch.Tensor] = []
        """Vectors that the C structures point to."""
        self._stored = torch.int8 if quantization == "int8" else dtype
        self._arena = Arena(_packed_bytes(model, shape, self._stored, self._columns))

    def pack(self, model: Any) -> PackedDecoder:
        """The packed model. Its weights are removed from it."""
        embedding = model.model.embed_tokens.weight.detach()
        tokens = len(embedding)
        is_tied = embedding.data_ptr() == model.lm_head.weight.data_ptr() and self._stored is embedding.dtype
        # A head that is tied to the embedding serves as its table. Otherwise a copy does: the loaded tensor would keep
        # the whole weight file mapped.
        table = None if is_tied else embedding.clone()
        del embedding
        model.model.embed_tokens = nn.Identity()
        vocabulary = model.lm_head.out_features
        final = self._vector(model.model.norm.weight)
        modules = list(decoder_layers(model))
        layers = (DecoderLayer * len(modules))()
        for index, layer in enumerate(modules):
            layers[index] = self._pack_layer(layer)
            _free_weights(layer)
            release_free_memory()
        head = self._matrix(model.lm_head.weight, model.lm_head.bias)
        _free_weights(model.model.norm)
        model.model.layers = nn.ModuleList()
        model.lm_head = nn.Identity()
        return PackedDecoder(
            shape=self._shape,
            dtype=self._dtype,
            tokens=tokens,
            vocabulary=vocabulary,
            layers=layers,
            final_norm=final,
            head=head,
            embedding=table,
            rotary=model.model.rotary_emb,
            memory=(self._arena.taken, *self._vectors),
        )

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
