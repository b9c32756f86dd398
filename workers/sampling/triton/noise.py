"""The Gumbel noise of `workers.sampling.noise` inside a kernel, bit for bit.

Kernels that draw noise are launched with `enable_fp_fusion=False`: a fused multiplication and addition rounds once
instead of twice, which changes bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from workers.sampling.noise import BIN_MASK, BIN_SHIFT, chords

LEAST_NOISE, MOST_NOISE = -3.14, 22.89
"""Bounds of the noise."""
_BIN_SHIFT, _BIN_MASK = tl.constexpr(BIN_SHIFT), tl.constexpr(BIN_MASK)


@lru_cache(maxsize=16)
def packed_chords(device: torch.device) -> torch.Tensor:
    """The line in each bin, int64 `[bins]`: the float32 bits of its intercept, and above them those of its slope."""
    return torch.stack(chords(device), dim=1).view(torch.int64).squeeze(1)


@triton.jit
def row_key(seed, position):
    """The 64-bit key of a row, from its int64 seed and position."""
    start = mix64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    return mix64(start ^ mix64(position.to(tl.uint64, bitcast=True) + 0xD1B54A32D192ED03))


@triton.jit
def mix64(value):
    """SplitMix64's finalizer."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def gumbel(key, tokens, is_drawn, lines):
    """The noise of int32 tokens under a row's key, float32 of their shape; 0 where `is_drawn` is false."""
    bits = avalanche(tokens.to(tl.uint32, bitcast=True)) ^ (key >> 32).to(tl.uint32)
    bits = avalanche(avalanche(bits) + (key & 0xFFFFFFFF).to(tl.uint32))
    distance = bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5
    index = (distance.to(tl.int32, bitcast=True) >> _BIN_SHIFT) & _BIN_MASK
    line = tl.load(lines + index, mask=is_drawn, other=0)
    intercept = (line & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    slope = (line >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return distance * slope + intercept


@triton.jit
def avalanche(bits):
    """Scramble uint32 words."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)
