"""The Triton kernels that decide (`workers.sampling.winners`), and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.sampling.triton.noise import LEAST_NOISE, MOST_NOISE, gumbel, packed_chords, row_key
from workers.sampling.triton.rows import exclude_entries, ordered_bits, warped_tile
from workers.sampling.triton.truncation import choose_digits, places, sum_digits
from workers.sampling.winners import PLACE_BITS, TILE, Rows, Search

_SPREAD = tl.constexpr(MOST_NOISE - LEAST_NOISE)
_NO_COLUMN = tl.constexpr(2147483647)
_ENTRIES = 1024
"""Entries of a program."""


class TritonDecisions:
    """Launches the kernels that decide. It is `DecisionKernels`."""

    def exclude_entries(
        self, excluded: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        entries = len(columns)
        exclude_entries[(triton.cdiv(entries, _ENTRIES),)](
            excluded, masks, rows, columns, entries, excluded.shape[1], COUNT=_ENTRIES
        )

    def largest_logits(self, logits: torch.Tensor, rows: Rows, orders: torch.Tensor, indices: torch.Tensor) -> None:
        largest_logits[(len(orders), rows.tiles)](
            *rows.of_logits(logits), rows.truncated, orders, indices, COUNT=TILE, num_warps=8
        )

    def sum_digits(self, logits: torch.Tensor, rows: Rows, search: Search, *, by_mass: bool, shift: int) -> None:
        sum_digits[(len(rows.truncated), rows.tiles)](
            *rows.of_logits(logits), rows.truncated, rows.limits, rows.shares, rows.tails, search.bests, search.edges,
            search.prefixes, search.sums, search.offset, **_digit(search, by_mass, shift), COUNT=TILE, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip

    def choose_digits(self, rows: Rows, search: Search, *, by_mass: bool, shift: int) -> None:
        choose_digits[(len(rows.truncated),)](
            rows.limits, rows.shares, search.edges, search.prefixes, search.wanted, search.sums,
            **_digit(search, by_mass, shift), num_warps=8,
        )  # fmt: skip

    def best_of_tiles(
        self,
        logits: torch.Tensor,
        rows: Rows,
        truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        parts: tuple[torch.Tensor, torch.Tensor],
        offset: int,
    ) -> None:
        bests, edges, indices = truncation
        best_of_tiles[(len(logits), rows.tiles)](
            *rows.of_logits(logits), rows.seeds, rows.positions, packed_chords(logits.device),
            indices, bests, edges, rows.gaps, *parts, offset,
            COUNT=TILE, TRUNCATES=len(rows.truncated) > 0, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip

    def join_tiles(
        self, parts: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor], offset: int
    ) -> None:
        rows, tiles = parts[0].shape
        join_tiles[(rows,)](*parts, *found, tiles, offset, TILES=triton.next_power_of_2(tiles))


def _digit(search: Search, by_mass: bool, shift: int) -> dict[str, object]:
    """The constants of the kernels that search for a digit."""
    bins = search.sums.shape[1]
    bits = bins.bit_length() - 1
    return {"BY_MASS": by_mass, "SHIFT": shift, "FIRST": shift + bits >= PLACE_BITS, "BITS": bits, "BINS": bins}


@triton.jit
def largest_logits(
    logits, temperatures, masks, excluded, ends, columns, factors, terms, size, stride, column_tiles,
    truncated, orders, truncations, COUNT: tl.constexpr,
):  # fmt: skip
    """The largest logit of each truncated row, as an ordered integer, and the index of the row's truncation."""
    index = tl.program_id(0)
    row = tl.load(truncated + index)
    _, value, _ = warped_tile(
        row, tl.program_id(1), logits, temperatures, masks, excluded, ends, columns, factors, terms, size, stride,
        column_tiles, COUNT,
    )  # fmt: skip
    tl.atomic_max(orders + index, ordered_bits(tl.max(value, axis=0)), sem="relaxed")
    tl.store(truncations + row, index)


@triton.jit
def best_of_tiles(
    logits, temperatures, masks, excluded, ends, columns, factors, terms, size, stride, column_tiles,
    seeds, positions, lines, truncations, bests, edges, gaps, parts, part_columns, offset,
    COUNT: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    """The best score of one tile of a row, and the lowest column that has it."""
    row, tile = tl.program_id(0), tl.program_id(1)
    column, value, is_column = warped_tile(
        row, tile, logits, temperatures, masks, excluded, ends, columns, factors, terms, size, stride, column_tiles,
        COUNT,
    )  # fmt: skip
    if TRUNCATES:
        index = tl.load(truncations + row)
        if index >= 0:
            is_column = is_column & (places(value, column + offset) >= tl.load(edges + index))
            is_column = is_column & (value >= tl.load(bests + index) + tl.load(gaps + index))
            value = tl.where(is_column, value, float("-inf"))
    if tl.load(temperatures + row) != 0.0:
        # Noise is bounded, so a token far below the best of its tile cannot win, and needs none. The second term is
        # above the rounding of large scores, which could make them equal.
        most = tl.max(value, axis=0)
        may_win = value >= most - (_SPREAD + tl.abs(most) * 1e-6)
        noise = gumbel(row_key(tl.load(seeds + row), tl.load(positions + row)), column + offset, may_win, lines)
        value = tl.where(may_win, noise + value, float("-inf"))
    best = tl.max(value, axis=0)
    place = row * tl.num_programs(1) + tile
    tl.store(parts + place, best)
    tl.store(part_columns + place, tl.min(tl.where((value == best) & is_column, column, _NO_COLUMN), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def join_tiles(parts, part_columns, values, tokens, tiles, offset, TILES: tl.constexpr):
    """The best score of a row over its tiles, and the lowest token that has it."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    value = tl.load(parts + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    column = tl.load(part_columns + row * tiles + tile, mask=tile < tiles, other=_NO_COLUMN)
    best = tl.max(value, axis=0)
    tl.store(values + row, best)
    tl.store(tokens + row, tl.min(tl.where(value == best, column, _NO_COLUMN), axis=0).to(tl.int64) + offset)
