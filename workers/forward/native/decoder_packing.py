"""Packs a Llama-like model's weights for the CPU kernels, with the C structures that point to them. See decoder.c.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from workers.forward.layer_lists import decoder_layers
from workers.forward.native.build import load_library
from workers.forward.native.decoder import NativeDecoder, PackedDecoder
from workers.forward.native.decoder_shape import DecoderShape, head_norms
from workers.forward.native.packed_linear import PackedMatrix, gate_up, gate_up_bias, has_rows, kernel_layout
from workers.forward.native.structures import GATE_UP_PARTS, QKV_PARTS, DecoderLayer, Matrix
from workers.forward.weights.base import Storage, joined_runs, stay_apart
from workers.forward.weights.choice import quantized_type
from workers.forward.weights.modules import StoredEmbedding, take_storage
from workers.kv.huge_pages import Arena
from workers.kv.start_memory import release_free_memory

_ROWS_AT_ONCE = 4096


def pack_decoder(
    model: Any, shape: DecoderShape, dtype: torch.dtype, quantization: str, directory: str | None
) -> NativeDecoder | None:
    """Pack the model's weights and remove them from it. Returns `None`, and changes nothing, without kernels."""
    library = load_library(directory)
    if library is None:
        return None
    return NativeDecoder(_Packer(shape, library, dtype, quantization).pack(model), library)


class _Packer:
    """Packs the weights of one model."""

    def __init__(self, shape: DecoderShape, library: ctypes.CDLL, dtype: torch.dtype, quantization: str) -> None:
        self._layout = kernel_layout(library)
        self._shape = shape
        self._dtype = dtype
        self._quantization = quantization
        self._vectors: list[torch.Tensor] = []
        """Vectors that the C structures point to."""
        self._stored = quantized_type(quantization, dtype)
        self._arena = Arena()

    def pack(self, model: Any) -> PackedDecoder:
        """The packed model. Its weights are removed from it."""
        release_free_memory()  # of the trial
        tokens, embedding, table = self._embedding(model)
        model.model.embed_tokens = nn.Identity()
        vocabulary = model.lm_head.out_features
        final = self._vector(model.model.norm.weight)
        modules = list(decoder_layers(model))
        layers = (DecoderLayer * len(modules))()
        for index, layer in enumerate(modules):
            layers[index] = self._pack_layer(layer)
            _free_weights(layer)
            release_free_memory()
        head = self._matrix(self._taken(model.lm_head), model.lm_head.bias)
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
            embedding=embedding,
            table=table,
            rotary=model.model.rotary_emb,
            memory=(*self._arena.taken, *self._vectors),
        )

    def _embedding(self, model: Any) -> tuple[int, torch.Tensor | None, Matrix | None]:
        """The number of tokens, and the table of embeddings, plain or packed; none if the packed head's rows are it."""
        embedding, head = model.model.embed_tokens, model.lm_head
        if isinstance(embedding, StoredEmbedding):
            storage = embedding.storage
            if not has_rows(storage):
                return storage.outputs, self._dequantized(storage), None
            if getattr(head, "storage", None) is storage:
                return storage.outputs, None, None
            if storage.is_widened:
                return storage.outputs, None, self._matrix(storage, None)
            return storage.outputs, self._dequantized(storage), None
        weight = embedding.weight.detach()
        is_tied = head.weight is not None and weight.data_ptr() == head.weight.data_ptr()
        # A copy, since the loaded tensor would keep the whole weight file mapped.
        return len(weight), None if is_tied and self._stored is weight.dtype else weight.clone(), None

    def _dequantized(self, storage: Storage) -> torch.Tensor:
        """A stored matrix as plain numbers `[out, in]`: itself if it is plain, else made without a float32 copy."""
        if (plain := storage.plain) is not None and plain.dtype is self._dtype:
            return plain.contiguous()
        table = torch.empty(storage.outputs, storage.inputs, dtype=self._dtype)
        for first in range(0, len(table), _ROWS_AT_ONCE):
            table[first : first + _ROWS_AT_ONCE] = storage.take_outputs(
                slice(first, first + _ROWS_AT_ONCE)
            ).dequantized()
        return table

    def _pack_layer(self, layer: Any) -> DecoderLayer:
        """Pack the weights of one layer."""
        attention, mlp = layer.self_attn, layer.mlp
        siblings = [attention.q_proj, attention.k_proj, attention.v_proj]
        norms = (layer.input_layernorm, layer.post_attention_layernorm, *(head_norms(attention)))
        return DecoderLayer(
            self._qkv(siblings),
            self._matrix(self._taken(attention.o_proj), attention.o_proj.bias),
            self._gate_up(mlp.gate_proj, mlp.up_proj),
            self._matrix(self._taken(mlp.down_proj), mlp.down_proj.bias),
            *(None if norm is None else self._vector(norm.weight) for norm in norms),
        )

    def _taken(self, layer: Any) -> Storage:
        """The matrix of a layer, which no longer holds it: no variable may hold it once it is packed."""
        return take_storage(layer, self._quantization)

    def _qkv(self, layers: list[Any]) -> ctypes.Array[Matrix]:
        """The outputs of all layers, in as few matrices as keep each as it is stored."""
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        runs = joined_runs([self._taken(layer) for layer in layers])
        biases = [None] * len(runs) if bias is None else torch.split(bias, [run.outputs for run in runs])
        return (Matrix * QKV_PARTS)(*(self._matrix(runs.pop(0), own) for own in biases))

    def _gate_up(self, gate: Any, up: Any) -> ctypes.Array[Matrix]:
        """Gates and ups in one matrix, or in two that are stored in different ways."""
        parts, biases = [self._taken(gate), self._taken(up)], [gate.bias, up.bias]
        if not stay_apart(parts):
            columns = self._layout.columns
            parts = [gate_up(parts.pop(0), parts.pop(0), columns)]
            biases = [None if gate.bias is None else gate_up_bias(gate.bias, up.bias, columns)]
        return (Matrix * GATE_UP_PARTS)(*(self._matrix(parts.pop(0), own) for own in biases))

    def _matrix(self, storage: Storage, bias: torch.Tensor | None) -> Matrix:
        packed = PackedMatrix(storage, bias, self._layout, self._arena)
        self._vectors += packed.vectors
        return packed.matrix

    def _vector(self, values: torch.Tensor) -> int:
        kept = values.detach().float().contiguous().clone()
        self._vectors.append(kept)
        return kept.data_ptr()


def _free_weights(layer: nn.Module) -> None:
    """Free what a packed layer has left, as norms and biases. Its matrices were freed one by one."""
    for module in layer.modules():
        module._parameters.clear()
