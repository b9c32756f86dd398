"""The C structures of decoder.c as ctypes sees them, and the buffers that they point to.

Field order and types must match the C source.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

from workers.kv.huge_pages import CACHE_LINE


class Matrix(ctypes.Structure):
    """A packed matrix."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "inputs", "outputs", "blocks")),
        *((name, ctypes.c_void_p) for name in ("weights", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("group", "scale_kind", "offset", "super", "planes", "less")),
        ("zero", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("order", "table")),
    ]


QKV_PARTS = 3
"""Most matrices that the queries, keys and values of a layer are packed as."""
GATE_UP_PARTS = 2
"""Most matrices that the gates and ups of a layer are packed as."""


class DecoderLayer(ctypes.Structure):
    """The weights of one decoder layer, and its part of the KV pool."""

    _fields_ = [
        ("qkv", Matrix * QKV_PARTS),
        ("out", Matrix),
        ("gate_up", Matrix * GATE_UP_PARTS),
        ("down", Matrix),
        *((f"{name}_norm", ctypes.c_void_p) for name in ("input", "post", "query", "key")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("table", "window", "sinks")),
    ]


class Decoder(ctypes.Structure):
    """A whole model."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "kv_kind")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        ("layer", ctypes.POINTER(DecoderLayer)),
        ("final_norm", ctypes.c_void_p),
        *((name, Matrix) for name in ("head", "table")),
        ("embedding_kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("embedding", "cos", "sin")),
    ]


class Pass(ctypes.Structure):
    """The inputs, outputs and work buffers of one forward pass."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "selected")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "x", "input", "gated", "qkv", "query", "key", "value")),
        ("layers", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("skip", "exit_norm", "inputs", "taps")),
        ("tap_count", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
    ]


class Norm(ctypes.Structure):
    """The weight and the bias of a layer norm."""

    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class SourcedLayer(ctypes.Structure):
    """The weights of one decoder layer with cross-attention, and its part of the KV pool. See sourced_decoder.c."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "query", "source_out", "up", "down")),
        *((name, Norm) for name in ("own_norm", "source_norm", "final_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("table", ctypes.c_int64),
    ]


class Screen(ctypes.Structure):
    """The C structure of an output head in 8 bits, with a bound of each logit's error; see leading.h."""

    _fields_ = [("matrix", Matrix), ("error", ctypes.c_void_p)]


class Leading(ctypes.Structure):
    """The C structure that asks for the largest logits of each row, with the buffers of that search; see leading.h."""

    _fields_ = [
        ("leaders", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("norms", "lower", "wanted")),
        ("count", ctypes.c_int64),
    ]


class SourcedDecoder(ctypes.Structure):
    """The decoder of an encoder-decoder model, and its head. See sourced_decoder.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "dim", "inner", "kv_kind", "activation")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale", "embedding_scale")),
        ("layer", ctypes.POINTER(SourcedLayer)),
        ("head", Matrix),
        ("embedding_kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("embedding", "positions")),
        ("embedding_norm", Norm),
        ("screen", ctypes.POINTER(Screen)),
    ]


class SourcedPass(ctypes.Structure):
    """The inputs, outputs and work buffers of one forward pass of a `SourcedDecoder`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "selected")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "x", "input", "inner", "active", "qkv", "key", "value")),
        ("layers", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("skip", "taps")),
        ("tap_count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "places")),
        ("leading", ctypes.POINTER(Leading)),
    ]


class WorkBuffers:
    """The buffers of a pass, one behind another, each from a new cache line on. The next pass reuses them."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def addresses(self, sizes: Sequence[int]) -> list[int]:
        """Addresses of buffers of these numbers of float32 numbers."""
        line = CACHE_LINE // 4
        offsets = [0, *accumulate(-(-size // line) * line for size in sizes)]
        if offsets[-1] > len(self._scratch):
            self._scratch = torch.empty(offsets[-1])
        base = self._scratch.data_ptr()
        return [base + 4 * offset for offset in offsets[:-1]]
