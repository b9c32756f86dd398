"""top-k and top-p in kernels: the place of the last token that each row keeps, found digit by digit.

A token's place is one integer: the order of its logit, then of its column, so that the lowest of equal tokens comes
first, and no two tokens have the same place. A pass over the logits counts tokens (top-k) or sums their probability
masses (top-p) by the next digit of their places. All sums are of integers, so neither their order nor how the
vocabulary is divided among ranks changes anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.sampling.decision_table import MOST_COLUMNS, NO_LIMIT
from workers.sampling.triton.rows import ordered_bits, warped_tile
from workers.sampling.truncate import UNIT_BITS

_NO_LIMIT = tl.constexpr(NO_LIMIT)
_LAST_COLUMN, _COLUMN_BITS = tl.constexpr(MOST_COLUMNS - 1), tl.constexpr(MOST_COLUMNS.bit_length() - 1)
_EXPONENT_BIAS = tl.constexpr(127 + UNIT_BITS)
_ROUNDER = tl.constexpr(12582912.0)
"""1.5 · 2²³: adding and subtracting it rounds a small float32 to the nearest integer, to the even one of two."""


@triton.jit
def sum_digits(
    logits, temperatures, masks, excluded, ends, columns, factors, terms, size, stride, column_tiles,
    truncated, limits, shares, tails, bests, edges, prefixes, sums, offset,
    BY_MASS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr, BINS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Add a tile's tokens, or their masses, to the sums of their digits, if the digits before are the chosen ones."""
    index = tl.program_id(0)
    is_searched = tl.load(shares + index) < 1.0 if BY_MASS else tl.load(limits + index) < _NO_LIMIT
    if is_searched:
        column, value, is_column = warped_tile(
            tl.load(truncated + index), tl.program_id(1), logits, temperatures, masks, excluded, ends, columns,
            factors, terms, size, stride, column_tiles, COUNT,
        )  # fmt: skip
        place = places(value, column + offset)
        digit = ((place >> SHIFT) & (BINS - 1)).to(tl.int32)
        is_counted = is_column
        if not FIRST:
            is_counted = is_counted & ((place >> (SHIFT + BITS)) == tl.load(prefixes + index))
        own = sums + index.to(tl.int64) * BINS
        if BY_MASS:
            is_counted = is_counted & (place >= tl.load(edges + index))
            gap = value - tl.maximum(tl.load(bests + index), -3.4028234663852886e38)
            mass = tl.where(is_counted, relative_masses(gap), 0)
            if FIRST:  # what lies far below is not told apart
                is_far = gap < tl.load(tails + index)
                tl.atomic_add(own, tl.sum(tl.where(is_far, mass, 0), axis=0), sem="relaxed")
                is_counted = is_counted & (is_far == 0)
            tl.atomic_add(own + digit, mass, mask=is_counted, sem="relaxed")
        else:
            found = tl.histogram(digit, BINS, mask=is_counted)
            bins = tl.arange(0, BINS)
            tl.atomic_add(own + bins, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def choose_digits(
    limits, shares, edges, prefixes, wanted, sums,
    BY_MASS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Choose the largest digit from which on upwards the sums reach what is wanted, and empty the sums."""
    index = tl.program_id(0)
    is_searched = tl.load(shares + index) < 1.0 if BY_MASS else tl.load(limits + index) < _NO_LIMIT
    if is_searched:
        bins = tl.arange(0, BINS)
        own = sums + index.to(tl.int64) * BINS
        found = tl.load(own + bins)
        tl.store(own + bins, tl.zeros([BINS], tl.int64))
        upwards = tl.cumsum(found, axis=0, reverse=True)
        if FIRST:
            prefix = tl.full([], 0, tl.int64)
            if BY_MASS:
                total = tl.sum(found, axis=0)
                least = tl.ceil(total.to(tl.float64) * tl.load(shares + index)).to(tl.int64)
                want = tl.minimum(tl.maximum(least, 1), total)
            else:
                want = tl.load(limits + index)
        else:
            prefix = tl.load(prefixes + index)
            want = tl.load(wanted + index)
        digit = tl.max(tl.where(upwards >= want, bins, 0), axis=0)
        prefix = (prefix << BITS) + digit
        tl.store(prefixes + index, prefix)
        tl.store(wanted + index, want - tl.sum(tl.where(bins > digit, found, 0), axis=0))
        if SHIFT == 0:
            tl.store(edges + index, prefix)


@triton.jit
def places(value, column):
    """The place of each token, int64: larger for larger logits, then for lower columns of the whole vocabulary."""
    order = ordered_bits(value).to(tl.int64) + 2147483648
    return (order << _COLUMN_BITS) + (_LAST_COLUMN - column)


@triton.jit
def relative_masses(gap):
    """e^gap in units of 2⁻⁴⁰, int64, by the operations of `workers.sampling.truncate.relative_masses`."""
    exponent = tl.maximum(gap * 1.4426950408889634, -64.0)
    whole = (exponent + _ROUNDER) - _ROUNDER
    rest = (exponent - whole) * 0.6931471805599453
    series = rest * 0.0013888888888888889 + 0.008333333333333333
    series = series * rest + 0.041666666666666664
    series = series * rest + 0.16666666666666666
    series = series * rest + 0.5
    series = series * rest + 1.0
    series = series * rest + 1.0
    return (series * ((whole.to(tl.int32) + _EXPONENT_BIAS) << 23).to(tl.float32, bitcast=True)).to(tl.int64)
