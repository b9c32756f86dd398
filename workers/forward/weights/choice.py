"""Chooses the storage of a matrix that is read as plain numbers."""

from __future__ import annotations

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.int8 import Int8Storage
from workers.forward.weights.plain import PlainStorage


def store(weight: torch.Tensor, quantization: str = "none", *, cut_inputs: bool = False) -> Storage:
    """The storage that a setting `quantization` gives to weights `[out, in]`.

    `cut_inputs`: these are one rank's inputs, and the ranks agree on what all inputs of an output share.
    """
    return Int8Storage.quantized(weight, cut_inputs) if quantization == "int8" else PlainStorage(weight)


def stored_as(weight: torch.Tensor, dtype: torch.dtype) -> Storage:
    """The storage of weights `[out, in]` in this data type: float32, bfloat16, or int8 with float32 scales."""
    weight = weight.detach()
    return Int8Storage.quantized(weight.float()) if dtype is torch.int8 else PlainStorage(weight.to(dtype))
