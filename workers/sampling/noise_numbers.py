"""The Gumbel noise of single tokens in plain Python, for drafters that need it for a few tokens only.

The bits are those of `workers.sampling.noise`; the quantile is computed by `math.log`, so that the last digits differ.
This module does not import torch.
"""

from __future__ import annotations

import math

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


def gumbel_number(seed: int, position: int, token: int) -> float:
    """The noise of `token` at a position of the sequence with this seed, to about 6 digits."""
    key = row_key(seed, position)
    bits = _avalanche(_avalanche(_avalanche(token) ^ (key >> 32)) + key & _MASK32)
    return -math.log(-math.log((bits + 0.5) * 2.0**-32))


def row_key(seed: int, position: int) -> int:
    """The 64-bit key of a row. Both numbers are mixed first, so that no stream is a shifted copy of another."""
    return _mix64(_mix64(seed + 0x9E3779B97F4A7C15) ^ _mix64(position + 0xD1B54A32D192ED03))


def _mix64(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014, with Stafford's constants): a bijection of 64 bits."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _avalanche(word: int) -> int:
    """Scramble a 32-bit word: a bijection of 32 bits (`lowbias32`, Wellons 2018)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D & _MASK32
    word = (word ^ (word >> 15)) * 0x846CA68B & _MASK32
    return word ^ (word >> 16)
