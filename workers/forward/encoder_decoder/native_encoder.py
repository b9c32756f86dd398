"""The encoder of Marian and BART whose whole pass is one call into the CPU kernels. See sourced_decoder.c.

Sources are read without padding, and each one's result is the same to the last bit, whatever is read beside it. Modules
of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from workers.forward.encoder_decoder.encoder import SourceEncoder
from workers.forward.encoder_decoder.packing import (
    SourcedPacker,
    SourcedShape,
    attention_matrices,
    buffer_sizes,
    shape_of_part,
    sourced_function,
)
from workers.forward.loaded_model import EncodedSources
from workers.forward.native.attention import StepHeader
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import linear_function
from workers.forward.native.structures import Matrix, Norm, SourcedLayer, SourcedPass, WorkBuffers

_PARTS = {"self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"}
_MOST_TOKENS = 1024
"""Most tokens of one pass, apart from a single longer source."""
_BEYOND = np.iinfo(np.int32).max


class NativeSourceEncoder:
    """The packed weights of an encoder and of the projection to keys and values. It is a `SourceReader`."""

    def __init__(
        self,
        reader: SourceEncoder,
        shape: SourcedShape,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        quantization: str,
    ) -> None:
        self._call = sourced_function(library)
        self._multiply = linear_function(library)
        self._shape = shape
        self._decoder_layers, self._decoder_heads = reader.layers, reader.heads
        encoder: Any = reader.encoder
        layers, head = list(encoder.layers), reader.projection
        self._packer = packer = SourcedPacker(library, dtype, quantization)
        self._layers = (SourcedLayer * len(layers))(*(_pack_layer(packer, layer) for layer in layers))
        self._tokens = len(encoder.embed_tokens.weight)
        self._width = int(head.weight.shape[0])
        self._head = packer.matrix(head.weight, head.bias)
        self._encoder = packer.stack(encoder, shape, self._layers, self._head, torch.float32)
        self._buffers = WorkBuffers()

    @torch.inference_mode()
    def encode(self, sources: Sequence[Sequence[int]], device: torch.device) -> Iterator[EncodedSources]:  # noqa: ARG002 - part of the interface
        """Encode sources in batches. Raises `IndexError` for a token that the encoder does not have."""
        first = 0
        while first < len(sources):
            end, tokens = first + 1, len(sources[first])
            while end < len(sources) and tokens + len(sources[end]) <= _MOST_TOKENS:
                tokens += len(sources[end])
                end += 1
            yield self._pass(range(first, end), sources[first:end])
            first = end

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor) -> EncodedSources:
        x = hidden.float().contiguous()
        projected, narrow = torch.empty((len(x), self._width)), torch.empty(x.shape, dtype=torch.bfloat16)
        head = ctypes.addressof(self._head)
        self._multiply(head, None, x.data_ptr(), narrow.data_ptr(), projected.data_ptr(), len(x))
        return EncodedSources((0,), self._by_layer(projected), hidden.bfloat16())

    def _by_layer(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(len(projected), self._decoder_layers, 2, self._decoder_heads, -1)

    def _pass(self, indices: Sequence[int], sources: Sequence[Sequence[int]]) -> EncodedSources:
        ids = np.array([token for source in sources for token in source], dtype=np.int64)
        if not 0 <= ids.min() <= ids.max() < self._tokens:
            raise IndexError(f"tokens {ids.min()} to {ids.max()}: the encoder has {self._tokens}")
        count = len(ids)
        lengths = np.array([len(source) for source in sources])
        everything, layers = np.arange(count, dtype=np.int64), len(self._layers)
        places = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        tapped = np.array([layers], dtype=np.int64)
        projected = torch.empty((count, self._width))
        hidden = torch.empty((count, self._shape.hidden), dtype=torch.bfloat16)
        buffers = self._buffers.addresses(buffer_sizes(self._shape, count))
        for layer in self._layers:  # keys and values are stored where the kernel leaves them
            layer.keys, layer.values = buffers[-2:]
        step, _arrays = _step(lengths)
        work = SourcedPass(
            *(ids.ctypes.data, everything.ctypes.data, count, projected.data_ptr(), *buffers),
            *(layers, None, tapped.ctypes.data, 1, hidden.data_ptr(), places.ctypes.data),
        )
        self._call(ctypes.byref(self._encoder), ctypes.byref(step), None, ctypes.byref(work))
        return EncodedSources(tuple(indices), self._by_layer(projected), hidden)


def _step(lengths: np.ndarray[Any, Any]) -> tuple[StepHeader, tuple[np.ndarray[Any, Any], ...]]:
    """Rows whose tokens see their whole row, in blocks of one token. The arrays must live as long as the header."""
    rows, longest = len(lengths), int(lengths.max())
    first_token = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(lengths, out=first_token[1:])
    blocks = first_token[:-1, None] + np.arange(longest, dtype=np.int32)[None]
    slots = np.arange(first_token[-1], dtype=np.int64)
    ends = np.full(rows, _BEYOND, dtype=np.int32)  # no row has a tree
    position = np.repeat(lengths - 1, lengths).astype(np.int32)
    path = np.zeros(1, dtype=np.int32)
    arrays = (np.ascontiguousarray(blocks, dtype=np.int32), slots, first_token, ends, ends, position, path)
    header = StepHeader(rows, len(slots), 1, longest, 0, *(array.ctypes.data for array in arrays))
    return header, arrays


def _pack_layer(packer: SourcedPacker, layer: Any) -> SourcedLayer:
    qkv, out = attention_matrices(packer, layer.self_attn)
    up, down = (packer.matrix(linear.weight, linear.bias) for linear in (layer.fc1, layer.fc2))
    own_norm, final_norm = packer.norm(layer.self_attn_layer_norm), packer.norm(layer.final_layer_norm)
    return SourcedLayer(qkv, out, Matrix(), Matrix(), up, down, own_norm, Norm(None, None), final_norm)


def pack_source_encoder(
    reader: SourceEncoder, config: Any, dtype: torch.dtype, quantization: str, directory: str | None
) -> NativeSourceEncoder | None:
    """Pack the weights of an encoder. `None` where that is impossible.

    The check covers the encoder's parts, not what they compute. The caller must compare the results of both.
    """
    shape = shape_of_part(reader.encoder, getattr(config, "activation_function", ""), _PARTS)
    if shape is None or dtype not in (torch.float32, torch.bfloat16) or type(reader.projection) is not nn.Linear:
        return None
    library = load_library(directory)
    return None if library is None else NativeSourceEncoder(reader, shape, library, dtype, quantization)
