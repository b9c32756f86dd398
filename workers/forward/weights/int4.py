"""4-bit weights with a scale and a minimum for each group of inputs. Activations are not quantized."""

from __future__ import annotations

import torch

from workers.forward.weights.base import Offset, Storage
from workers.forward.weights.groups import GroupStorage, pairs
from workers.forward.weights.int8 import Int8Storage

_GROUPS = (32, 16, 8)
"""Sizes of groups, the preferred one first: their inputs fill whole words of 4-bit values."""
_STEPS = 15
"""The largest value of 4 bits."""
_SLICE_OUTPUTS = 1024  # weights are quantized for so many outputs at a time, which bounds the float32 copies


def quantized_groups(weight: torch.Tensor) -> Storage:
    """Quantize weights `[out, in]` to 4 bits, rounding to the nearest.

    A group is 32 neighbouring inputs, or 16 or 8 where their number is no multiple of 32. With a number of inputs that
    is no multiple of 8, the weights become int8 with one scale per output.
    """
    group = next((size for size in _GROUPS if weight.shape[1] % size == 0), None)
    if group is None:
        return Int8Storage.quantized(weight.float())
    parts = [_quantized(part.float(), group) for part in torch.split(weight, _SLICE_OUTPUTS)]
    return parts[0].joined(parts[1:])


def _quantized(weight: torch.Tensor, group: int) -> GroupStorage:
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.aminmax(dim=2)
    # bfloat16 holds the scale of any finite weights. The values are computed with scales and minima as they are stored.
    minimum, scale = low.bfloat16(), ((high - low) / _STEPS).bfloat16()
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    values = ((groups - minimum.float()[..., None]) / step[..., None]).round().clamp(0, _STEPS).to(torch.uint8)
    return GroupStorage(pairs(values), scale, 4, Offset.MINIMUM, minimum)
