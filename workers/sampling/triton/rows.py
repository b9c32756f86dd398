"""How kernels read the rows of a step: its contexts on the device, and a row's warped logits, one tile at a time.

A row is divided into tiles of columns. After these come tiles of its entries, the columns whose logits are changed by
themselves; a mask takes them out of the tiles of columns. Every kernel treats both kinds alike, so logits are neither
copied nor written.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import triton
import triton.language as tl

from workers.sampling.decision_table import WORD, DecisionTable
from workers.transfer import to_device_together

TILE = 4096
"""Columns or entries of a tile."""
_ENTRIES = 1024
_WORD = tl.constexpr(WORD)
_LARGEST_LOGIT = tl.constexpr(1e30)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The fields of a `DecisionTable` on the device. `excluded` has all masks, with the columns of entries."""

    seeds: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    masks: torch.Tensor
    excluded: torch.Tensor
    ends: torch.Tensor
    columns: torch.Tensor
    factors: torch.Tensor
    terms: torch.Tensor
    truncated: torch.Tensor
    limits: torch.Tensor
    shares: torch.Tensor
    tails: torch.Tensor
    gaps: torch.Tensor
    column_tiles: int
    entry_tiles: int
    """Tiles of the row with the most entries."""

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return self.column_tiles + self.entry_tiles

    def of_logits(self, logits: torch.Tensor) -> tuple[object, ...]:
        """The arguments that all kernels have first."""
        return (
            logits, self.temperatures, self.masks, self.excluded, self.ends, self.columns, self.factors, self.terms,
            logits.shape[1], logits.stride(0), self.column_tiles,
        )  # fmt: skip


def rows_on(device: torch.device, table: DecisionTable, size: int) -> Rows:
    """Copy a table for logits `[n, size]` to the device in one piece."""
    arrays = {field.name: getattr(table, field.name) for field in fields(table) if field.name != "mask_count"}
    integers = [array.view(np.int64 if array.itemsize == 8 else np.int32) for array in arrays.values()]
    found = {
        name: part.view(torch.from_numpy(array).dtype)
        for (name, array), part in zip(arrays.items(), to_device_together(integers, device), strict=True)
    }
    words = -(-size // WORD)
    masks = torch.zeros((table.mask_count, words), dtype=torch.int32, device=device)
    masks.view(-1)[: table.excluded.size].copy_(found["excluded"].flatten())
    entries = len(table.columns)
    if entries:
        exclude_entries[(triton.cdiv(entries, _ENTRIES),)](
            masks, found["masks"], found["rows"], found["columns"], entries, words, COUNT=_ENTRIES
        )
    found["excluded"] = masks
    del found["rows"]
    return Rows(**found, column_tiles=triton.cdiv(size, TILE), entry_tiles=triton.cdiv(table.most_entries, TILE))


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
