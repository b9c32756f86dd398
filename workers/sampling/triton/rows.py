"""How kernels read the rows of a step: a row's warped logits, one tile at a time.

A row is divided into tiles of columns. After these come tiles of its entries, the columns whose logits are changed by
themselves; a mask takes them out of the tiles of columns. Every kernel treats both kinds alike, so logits are neither
copied nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.sampling.decision_table import WORD

_WORD = tl.constexpr(WORD)
_LARGEST_LOGIT = tl.constexpr(1e30)


@triton.jit(do_not_specialize=["entries"])
def exclude_entries(excluded, masks, rows, columns, entries, words, COUNT: tl.constexpr):
    """Set the bits of the columns of entries in the masks of their rows."""
    entry = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    is_entry = entry < entries
    row = tl.load(rows + entry, mask=is_entry, other=0)
    column = tl.load(columns + entry, mask=is_entry, other=0)
    mask = tl.load(masks + row, mask=is_entry, other=0).to(tl.int64)
    tl.atomic_or(excluded + mask * words + column // _WORD, 1 << (column % _WORD), mask=is_entry, sem="relaxed")


@triton.jit
def warped_tile(
    row, tile, logits, temperatures, masks, excluded, ends, columns, factors, terms, size, stride, column_tiles,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Columns, logits after all processors but truncation, and whether there is such a column, of one tile of a row."""
    index = tl.arange(0, COUNT)
    if tile < column_tiles:
        column = tile * COUNT + index
        is_column = column < size
        mask = tl.load(masks + row)
        if mask >= 0:
            words = tl.cdiv(size, _WORD)
            word = tl.load(excluded + mask.to(tl.int64) * words + column // _WORD, mask=is_column, other=0)
            is_column = is_column & (((word >> (column % _WORD)) & 1) == 0)
        logit = clean_logits(logits + row.to(tl.int64) * stride + column, is_column)
    else:
        entry = tl.load(ends + row) + (tile - column_tiles) * COUNT + index
        is_column = entry < tl.load(ends + row + 1)
        column = tl.load(columns + entry, mask=is_column, other=0)
        factor = tl.load(factors + entry, mask=is_column, other=1.0)
        term = tl.load(terms + entry, mask=is_column, other=0.0)
        logit = clean_logits(logits + row.to(tl.int64) * stride + column, is_column)
        positive = tl.where(factor == 0.0, 1.0, factor)
        changed = tl.where(logit > 0.0, tl.div_rn(logit, positive), logit * factor) + term
        logit = tl.where(factor == 0.0, term, changed)
    temperature = tl.load(temperatures + row)
    logit = tl.div_rn(logit, tl.zeros([COUNT], tl.float32) + tl.where(temperature == 0.0, 1.0, temperature))
    return column, tl.where(is_column, logit, float("-inf")), is_column


@triton.jit
def clean_logits(pointers, is_read):
    """Logits in float32 without NaN and plus infinity; minus infinity where nothing is read."""
    logit = tl.load(pointers, mask=is_read, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    return tl.where(logit == float("inf"), _LARGEST_LOGIT, logit)


@triton.jit
def ordered_bits(value):
    """int32 in the order of float32 numbers; both zeros are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
