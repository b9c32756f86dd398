"""Keys and values in 8 bits on GPUs: quantized where they are stored, and widened in registers where they are read.

`workers.kv.eight_bits` is the reference: stored numbers and scales have its bits. Numbers of both types are int8 to the
kernels. E4M3 is decoded and rounded by integer arithmetic, so GPUs without such numbers compute it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kv.eight_bits import BOUND, LARGEST, LEAST

AS_IT_IS, INT8, E4M3 = 0, 1, 2
"""How numbers are stored."""
_BOUND, _LEAST = tl.constexpr(BOUND), tl.constexpr(LEAST)
_FLOAT16_BOUND = tl.constexpr(torch.finfo(torch.float16).max)
_INT8_SHARE = tl.constexpr(1 / LARGEST[torch.int8])
_E4M3_SHARE = tl.constexpr(1 / LARGEST[torch.float8_e4m3fn])
_INT8, _E4M3 = tl.constexpr(INT8), tl.constexpr(E4M3)
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: a sum with a small number is rounded to a whole one, ties to even."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """The keys and values of one layer as kernels read and write them."""

    keys: torch.Tensor
    """`[blocks, block size, KV heads, dim]`, with contiguous heads; int8 in 8 bits, whatever the type."""
    values: torch.Tensor
    key_scales: torch.Tensor
    """float32 `[blocks, block size, KV heads]`; the keys where they have no scales."""
    value_scales: torch.Tensor
    kind: int
    """`AS_IT_IS`, `INT8` or `E4M3`."""

    @property
    def scale_slot(self) -> int:
        """Numbers from the scales of a slot to those of the next."""
        return self.key_scales.stride(1)


def layer_of(
    stored: tuple[torch.Tensor, torch.Tensor], scales: tuple[torch.Tensor, torch.Tensor] | None
) -> StoredLayer:
    """A layer's keys and values, and their scales if they have 8 bits (`KvStore.of`, `KvStore.scales_of`)."""
    keys, values = stored
    if scales is None:
        return StoredLayer(keys, values, keys, values, AS_IT_IS)
    kind = INT8 if keys.dtype is torch.int8 else E4M3
    return StoredLayer(keys.view(torch.int8), values.view(torch.int8), *scales, kind)


@triton.jit
def store_heads(
    numbers, is_number, head, dim, is_head, stored, scales, slot, slot_stride, head_stride, scale_stride,
    KIND: tl.constexpr,
):  # fmt: skip
    """Quantize the heads of one token, `[heads, dim]` in the model's type, and store numbers and scales at its slot."""
    wide = numbers.to(tl.float32)
    wide = tl.where(is_number & (wide == wide), wide, 0.0)
    if numbers.dtype == tl.float16:
        wide = tl.minimum(tl.maximum(wide, -_FLOAT16_BOUND), _FLOAT16_BOUND)
    else:
        wide = tl.minimum(tl.maximum(wide, -_BOUND), _BOUND)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), _LEAST)[:, None]
    scale = largest * (_INT8_SHARE if KIND == _INT8 else _E4M3_SHARE)
    share = tl.div_rn(wide, tl.broadcast_to(scale, wide.shape))
    small = rounded(share) if KIND == _INT8 else to_e4m3(share)
    tl.store(stored + slot * slot_stride + head * head_stride + dim, small, mask=is_number)
    tl.store(scales + slot * scale_stride + head, scale, mask=is_head)


@triton.jit
def rounded(number):
    """The nearest int8 of a number between -127 and 127, ties to even."""
    return ((number + _WHOLE) - _WHOLE).to(tl.int8)


@triton.jit
def to_e4m3(number):
    """The bits of the nearest E4M3 number of one between -448 and 448, ties to even."""
    bits = number.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below 2^-6 all steps are 2^-9, as those of float32 from 2^14 on.
    least = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    usual = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    return (tl.where(size < (121 << 23), least, usual) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def widened(numbers, KIND: tl.constexpr, like):
    """Stored numbers in the type of `like`, exactly. E4M3 is 2^-8 of its value: see `scaled`."""
    if KIND == _E4M3:
        bits = numbers.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        result = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(like)
    elif KIND == _INT8:
        result = numbers.to(tl.float32).to(like)
    else:
        result = numbers
    return result


@triton.jit
def scaled(factors, scales, slots, is_read, KIND: tl.constexpr):
    """Factors `[queries, slots]` of what `widened` returns, times the slots' scales, 0 where they are not read."""
    if KIND == _E4M3:
        factors *= (tl.load(scales + slots, mask=is_read, other=0.0) * 256.0)[None, :]
    elif KIND == _INT8:
        factors *= tl.load(scales + slots, mask=is_read, other=0.0)[None, :]
    return factors
