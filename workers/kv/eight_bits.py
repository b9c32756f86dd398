"""Keys and values in 8 bits, with a scale for each token and KV head.

What a layer stores of a token is one record: the numbers of all heads, then their scales in float32, padded to whole
vectors of 16 bytes. So whatever copies, moves or saves blocks carries both. A number is quantized once, when it is
written, and every reader reads the same one.
"""

from __future__ import annotations

import torch

from workers.kv.spec import LayerShape

STORED_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The types of stored numbers by the values of `kv.dtype`."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The number that the largest one of a head becomes."""
BOUND = 3e38
"""Larger numbers and infinities are stored as this one, or as the largest that their type has: times their scale, they
stay finite."""
LEAST = 1e-30
"""A head whose numbers are all smaller has the scale of this one, so no scale is zero."""
_VECTOR = 16
_SCALE = torch.float32.itemsize


def first_scale(shape: LayerShape) -> int:
    """Where the scales begin in a record, in bytes."""
    return -(-shape.kv_heads * shape.head_dim // _SCALE) * _SCALE


def record_bytes(shape: LayerShape) -> int:
    """Bytes of one token's keys, or of its values, in a layer."""
    return -(-(first_scale(shape) + shape.kv_heads * _SCALE) // _VECTOR) * _VECTOR


def numbers_in(records: torch.Tensor, shape: LayerShape, stored: torch.dtype) -> torch.Tensor:
    """A view of the numbers in records, uint8 `[blocks, block_size, record]` → `[blocks, block_size, heads, dim]`."""
    numbers = records[..., : shape.kv_heads * shape.head_dim].view(*records.shape[:2], shape.kv_heads, shape.head_dim)
    return numbers.view(stored)


def scales_in(records: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """A view of the scales in records, uint8 `[blocks, block_size, record]` → float32 `[blocks, block_size, heads]`."""
    first = first_scale(shape)
    return records[..., first : first + shape.kv_heads * _SCALE].view(torch.float32)


def quantize(fresh: torch.Tensor, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers `[tokens, heads, dim]` of the type `stored`, and scales, float32 `[tokens, heads]`.

    NaN becomes 0. The largest number of a head becomes the largest that the type has.
    """
    bound = min(BOUND, torch.finfo(fresh.dtype).max)
    finite = fresh.float().nan_to_num(0.0, bound, -bound).clamp(-bound, bound)
    scales = finite.abs().amax(-1).clamp_min(LEAST) * (1 / LARGEST[stored])
    numbers = finite / scales[..., None]
    return (numbers.round() if stored is torch.int8 else numbers).to(stored), scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers `[…, heads, dim]` times their scales `[…, heads]`, in `dtype`."""
    return (numbers.float() * scales[..., None]).to(dtype)
