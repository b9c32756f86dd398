"""Chooses the storage of a matrix that is read as plain numbers."""

from __future__ import annotations

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.int4 import quantized_groups
from workers.forward.weights.int8 import Int8Storage
from workers.forward.weights.plain import PlainStorage

INT4 = torch.quint4x2
"""The type that stands for 4 bits in groups: torch has no tensors with such groups."""
STORED_TYPES = (torch.float32, torch.bfloat16, torch.int8, INT4)
"""The types that `stored_as` takes."""
_QUANTIZED = {"int8": torch.int8, "int4": INT4}


def quantized_type(quantization: str, dtype: torch.dtype) -> torch.dtype:
    """The type in which a setting `quantization` stores plain weights of a model in `dtype`; see `stored_as`."""
    return _QUANTIZED.get(quantization, dtype)


def store(weight: torch.Tensor, quantization: str = "none", *, cut_inputs: bool = False) -> Storage:
    """The storage that a setting `quantization` gives to weights `[out, in]`.

    `cut_inputs`: these are one rank's inputs, and the ranks agree on what all inputs of an output share.
    """
    if quantization == "int8":
        return Int8Storage.quantized(weight, cut_inputs)
    return quantized_groups(weight) if quantization == "int4" else PlainStorage(weight)


def stored_as(weight: torch.Tensor, dtype: torch.dtype) -> Storage:
    """The storage of weights `[out, in]` in one of `STORED_TYPES`.

    int8 has one float32 scale per output, `INT4` a scale and a minimum for each group of inputs (see
    `quantized_groups`).
    """
    weight = weight.detach()
    if dtype is INT4:
        return quantized_groups(weight)
    return Int8Storage.quantized(weight.float()) if dtype is torch.int8 else PlainStorage(weight.to(dtype))
