"""The decoder of Marian and BART whose whole forward pass is one call into the CPU kernels. See sourced_decoder.c.

Modules of `transformers` have the type `Any`, because only the names of their parts are known here.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cluster.core.errors import ConfigurationError
from workers.forward.encoder_decoder.packing import (
    SourcedPacker,
    SourcedShape,
    attention_matrices,
    buffer_sizes,
    shape_of_part,
    sourced_function,
)
from workers.forward.layer_lists import decoder_layers
from workers.forward.layout import RowShape
from workers.forward.loaded_model import WHOLE_PASS, PassOptions, PassOutput
from workers.forward.native.attention import address, build_native_source_step, build_native_step
from workers.forward.native.build import load_library
from workers.forward.native.screen import MOST_LEADERS, HeadScreen
from workers.forward.native.structures import SourcedLayer, SourcedPass, WorkBuffers
from workers.kv.groups import KvCacheGroups
from workers.kv.pool import KvPool

_LEAST_SCREENED = 4096
"""Smallest vocabulary whose head is screened. A smaller head is read in less time than the screen takes."""
_PARTS = {"self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm", "fc1", "fc2"}
_PARTS |= {"final_layer_norm"}


class NativeSourcedDecoder:
    """The packed weights of a decoder, and the call into the kernels. Packing removes the layers from the model."""

    def __init__(
        self, model: Any, shape: SourcedShape, library: ctypes.CDLL, dtype: torch.dtype, quantization: str
    ) -> None:
        self._decode = sourced_function(library)
        self._shape = shape
        decoder = model.decoder
        layers = list(decoder_layers(model))
        self._packer = packer = SourcedPacker(library, dtype, quantization)
        self._layers = (SourcedLayer * len(layers))(*(_pack_layer(packer, layer) for layer in layers))
        self._tokens = len(decoder.embed_tokens.weight)
        self._vocabulary = int(model.lm_head.weight.shape[0])
        head = packer.matrix(model.lm_head.weight, _head_bias(model))
        self._decoder = packer.stack(decoder, shape, self._layers, head, dtype)
        self._screen: HeadScreen | None = None
        if dtype is torch.float32 and quantization == "none" and self._vocabulary >= _LEAST_SCREENED:
            self._screen = HeadScreen(model.lm_head.weight, _head_bias(model), library)
            self._decoder.screen = self._screen.address
        decoder.layers = nn.ModuleList()
        model.lm_head = nn.Identity()
        self._kv_groups: KvCacheGroups | None = None
        self._buffers = WorkBuffers()

    def bind(self, pool: KvPool) -> None:
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
        options: PassOptions = WHOLE_PASS,
        taps: Sequence[int] = (),
    ) -> PassOutput:
        """Run one step over the bound pool.

        Raises `IndexError` for a token that the model does not have, `ConfigurationError` for `inputs`, which no
        method gives to such a model, and for a norm after a part of the layers, since the decoder has no final norm.
        """
        if self._kv_groups is None:
            raise RuntimeError("bind a pool before computing")
        if options.partial.exit_norm is not None:
            raise ConfigurationError("exit_norm is refused: this decoder has no norm after its last layer")
        if options.inputs is not None:
            raise ConfigurationError("inputs are refused: the decoder of an encoder-decoder model reads tokens")
        step, sources = build_native_step(rows, self._kv_groups), build_native_source_step(rows, self._kv_groups)
        if not 0 <= min(tokens) <= max(tokens) < self._tokens:
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)}: the model has {self._tokens}")
        ids, indices = array("q", tokens), array("q", selected)
        tapped = array("q", taps)
        logits = torch.empty((len(indices), self._vocabulary))
        skip = array("B", options.partial.skipped_parts(len(self._layers)))
        hidden = torch.empty((len(ids), len(tapped) * self._shape.hidden), dtype=torch.bfloat16) if tapped else None
        work = SourcedPass(
            *(address(ids), address(indices), len(indices), logits.data_ptr()),
            *self._buffers.addresses(buffer_sizes(self._shape, max(len(ids), len(indices)))),
            *(options.partial.layers or len(self._layers), address(skip) if skip else None),
            *(address(tapped), len(tapped), None if hidden is None else hidden.data_ptr(), None),
        )
        screen = self._screen
        if screen is not None and 0 < options.leaders <= MOST_LEADERS and len(indices) <= screen.most_rows:
            leading, _buffers = screen.leading(options.leaders, len(indices))
            work.leading = ctypes.pointer(leading)
        headers = (ctypes.byref(step.header), ctypes.byref(sources.header))
        self._decode(ctypes.byref(self._decoder), *headers, ctypes.byref(work))
        return PassOutput(logits, hidden)


def _pack_layer(packer: SourcedPacker, layer: Any) -> SourcedLayer:
    source = layer.encoder_attn
    others = (source.q_proj, source.out_proj, layer.fc1, layer.fc2)
    matrices = (packer.matrix(linear.weight, linear.bias) for linear in others)
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    return SourcedLayer(*attention_matrices(packer, layer.self_attn), *matrices, *map(packer.norm, norms))


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
    decoder = getattr(model, "decoder", None)
    shape = shape_of_part(decoder, getattr(model.config, "activation_function", ""), _PARTS)
    if shape is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    return None if type(model.lm_head) is not nn.Linear or model.scale else shape
