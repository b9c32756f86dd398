"""Gumbel noise that depends on (seed, position, token) alone.

The generator is counter-based: it hashes the token under a 64-bit key made of seed and position. Any part of any row
can therefore be drawn alone, in any order, on any rank. The 32 uniform bits are computed by wrapping integer
arithmetic. From these bits to the Gumbel quantile, only operations are used that IEEE 754 rounds exactly (conversion,
table look-up, one multiplication, one addition, each in a kernel of its own), and the table is built without libm. The
noise therefore has the same bits on every device, in every batch shape and with every number of threads. These
functions must not be compiled: a compiler may fuse multiplication and addition, which changes the bits.

The 32 bits `h` stand for u = (h + ½) / 2³², and the noise is −ln(−ln u). It is interpolated linearly in 256 bins per
octave of the distance to the nearer end of (0, 1). The interpolation differs from the exact quantile by at most
2·10⁻⁶, and with the rounding to float32 by 3.4·10⁻⁶. The noise ranges from −3.13 to 22.88.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from workers.transfer import tensor_on

_MASK64 = (1 << 64) - 1
_CPU_CHUNK = 1 << 16
"""Elements drawn at a time on a CPU, so that three buffers of them fit into the second-level cache."""

BIN_SHIFT = 15
"""Bits of a float32 below the sign, the exponent and the 8 bits of mantissa that select the bin."""
_BINS = 1 << (32 - BIN_SHIFT)
BIN_MASK = _BINS - 1


def gumbel(
    seeds: Sequence[int],
    positions: Sequence[int],
    offset: int,
    size: int,
    device: torch.device | str,
    columns: Tensor | None = None,
) -> Tensor:
    """The noise of tokens `offset … offset + size - 1`: float32 [n, size], on `device`.

    With `columns`, int64 [n, k], the noise of these columns alone: float32 [n, k]. Row `i` depends on `seeds[i]`
    (unsigned 64-bit), `positions[i]` and the token alone. Raises `ValueError` for arguments of unequal length or out of
    range.
    """
    return _noise(seeds, positions, _range_digests(offset, size, torch.device(device)), columns)


def gumbel_of(
    seeds: Sequence[int],
    positions: Sequence[int],
    tokens: Tensor,
    device: torch.device | str,
    columns: Tensor | None = None,
) -> Tensor:
    """Gumbel noise of the given tokens only, float32 [n, size], equal to those columns of `gumbel`.

    `tokens` is int64 [size]; it must not be changed afterwards, because its digests are cached.
    """
    return _noise(seeds, positions, _token_digests(tokens, torch.device(device)), columns)


def _noise(seeds: Sequence[int], positions: Sequence[int], digests: Tensor, columns: Tensor | None) -> Tensor:
    """Noise from the digests [size] of all tokens: float32 of shape [n, size], or of the shape of `columns`."""
    if len(seeds) != len(positions):
        raise ValueError(f"{len(seeds)} seeds for {len(positions)} positions")
    device = digests.device
    high, low = _key_columns(seeds, positions, device)
    size = len(digests) if columns is None else columns.shape[1]
    noise = torch.empty(len(seeds), size, device=device)
    rows = max(1, _CPU_CHUNK // max(1, size)) if device.type == "cpu" else max(1, len(seeds))
    for first in range(0, len(seeds), rows):
        part = slice(first, first + rows)
        bits = (digests if columns is None else digests[columns[part]]) ^ high[part]  # [rows, size]
        _avalanche(bits)
        bits += low[part]
        _avalanche(bits)
        _quantile(bits, out=noise[part])
    return noise


# --- bits -------------------------------------------------------------------------------------


def _key_columns(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The two halves of each row's key: int32 [n, 1] each."""
    halves: list[tuple[int, int]] = []
    for seed, position in zip(seeds, positions, strict=True):
        if not 0 <= seed <= _MASK64 or position < 0:
            raise ValueError(f"seed {seed} must be an unsigned 64-bit number and position {position} at least 0")
        key = _row_key(seed, position)
        halves.append((_signed(key >> 32), _signed(key & 0xFFFFFFFF)))
    columns = tensor_on(device, halves, torch.int32).reshape(-1, 2)
    return columns[:, :1], columns[:, 1:]


def _row_key(seed: int, position: int) -> int:
    """The 64-bit key of a row. Both numbers are mixed first, so that no stream is a shifted copy of another."""
    return _mix64(_mix64(seed + 0x9E3779B97F4A7C15) ^ _mix64(position + 0xD1B54A32D192ED03))


def _mix64(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014, with Stafford's constants): a bijection of 64 bits."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _signed(word: int) -> int:
    """The int32 that has the bits of an unsigned 32-bit word."""
    return word - (1 << 32) if word >> 31 else word


def _avalanche(bits: Tensor) -> None:
    """Scramble int32 words in place: a bijection of 32 bits (`lowbias32`, Wellons 2018)."""
    scratch = torch.empty_like(bits)
    for shift, multiplier in ((16, 0x7FEB352D), (15, _signed(0x846CA68B)), (16, 1)):
        torch.bitwise_right_shift(bits, shift, out=scratch)
        scratch &= (1 << (32 - shift)) - 1  # torch has no logical shift: mask the sign bits that were shifted in
        bits ^= scratch
        if multiplier != 1:
            bits *= multiplier


@lru_cache(maxsize=16)
def _range_digests(offset: int, size: int, device: torch.device) -> Tensor:
    """Digests of the tokens `offset … offset + size - 1`, the same for all rows: int32 [size]."""
    if offset < 0 or size < 0 or offset + size > 1 << 31:
        raise ValueError(f"tokens {offset} to {offset + size} are no 31-bit numbers")
    digests = torch.arange(offset, offset + size, dtype=torch.int32, device=device)
    _avalanche(digests)
    return digests


@lru_cache(maxsize=4)  # tensors hash by identity, so the cache compares no elements
def _token_digests(tokens: Tensor, device: torch.device) -> Tensor:
    """Digests of any tokens, as `_range_digests`."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 31:
        raise ValueError(f"tokens {int(tokens.min())} to {int(tokens.max())} are no 31-bit numbers")
    digests = tokens.to(device, torch.int32, copy=True)
    _avalanche(digests)
    return digests


# --- quantile ---------------------------------------------------------------------------------


def _quantile(bits: Tensor, out: Tensor) -> None:
    """−ln(−ln u) of int32 words [rows, size] into float32 `out` of that shape; `bits` is overwritten.

    A word h, read as signed, is a distance in units of 2⁻³²: h + ½ from 0 if it is positive, −(h + ½) from 1 if it is
    negative. As a float32, its sign selects the end, its exponent the octave, and the head of its mantissa the bin.
    """
    intercepts, slopes = chords(bits.device)
    out.copy_(bits)
    out += 0.5
    torch.bitwise_right_shift(out.view(torch.int32), BIN_SHIFT, out=bits)
    bits &= BIN_MASK
    bins = bits.reshape(-1)
    out *= slopes.index_select(0, bins).view_as(out)
    out += intercepts.index_select(0, bins).view_as(out)


@lru_cache(maxsize=16)
def chords(device: torch.device) -> tuple[Tensor, Tensor]:
    """Intercept and slope of the line in each bin: float32 [_BINS] each; bins that do not occur hold 0.

    They are computed in float64 on the CPU by exactly rounded operations and then copied, so that every device has the
    same bits.
    """
    starts = torch.arange(_BINS // 2, dtype=torch.int32) << BIN_SHIFT  # the float32 bits of each bin's start
    left = starts.view(torch.float32).double()
    right = (starts + (1 << BIN_SHIFT)).view(torch.float32).double()
    occurs = (left >= 0.5) & (left <= 2.0**31)
    left, right = left[occurs], right[occurs].clamp(max=2.0**31)  # ½ … 2³¹, in units of 2⁻³²
    intercepts, slopes = torch.zeros(2, _BINS, dtype=torch.float64)
    for half, sign in ((slice(0, _BINS // 2), 1.0), (slice(_BINS // 2, _BINS), -1.0)):
        at_left, at_right = (_exact_quantile(edge * 2.0**-32, from_one=sign < 0) for edge in (left, right))
        width = (right - left).clamp(min=1.0)  # the last bin is the one point u = ½
        slope = (at_right - at_left) / width
        intercepts[half][occurs] = at_left - slope * left
        slopes[half][occurs] = slope * sign
    return intercepts.float().to(device), slopes.float().to(device)


def _exact_quantile(distance: Tensor, from_one: bool) -> Tensor:
    """−ln(−ln u) in float64, for u = `distance` or 1 − `distance`, and 0 < distance ≤ ½."""
    return -_ln(-_ln_one_minus(distance) if from_one else -_ln(distance))


def _ln(value: Tensor) -> Tensor:
    """ln in float64 by exactly rounded operations only, because libm implementations differ in the last bit."""
    mantissa, exponent = torch.frexp(value)
    return exponent.double() * 0.6931471805599453 + _ln_one_minus(1.0 - mantissa)


def _ln_one_minus(value: Tensor) -> Tensor:
    """ln(1 − v) for 0 ≤ v ≤ ½, as −2 artanh(v / (2 − v)) by its series."""
    ratio = value / (2.0 - value)  # at most ⅓
    square = ratio * ratio
    series = torch.zeros_like(value)
    for odd in range(37, 0, -2):
        series = series * square + 1.0 / odd
    return -2.0 * ratio * series
