"""The C structures of decoder.c as ctypes sees them. Field order and types must match the C source."""

from __future__ import annotations

import ctypes


class Matrix(ctypes.Structure):
    """A packed matrix."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "inputs", "outputs", "blocks")),
        *((name, ctypes.c_void_p) for name in ("weights", "scale", "bias")),
    ]


class DecoderLayer(ctypes.Structure):
    """The weights of one decoder layer, and its part of the KV pool."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
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
        ("head", Matrix),
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
