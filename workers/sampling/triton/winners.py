"""Decisions by Triton kernels: logits processors, Gumbel noise and argmax in one pass over the logits.

The tokens are those of `workers.sampling.decide`, whose functions on PyTorch's operators are the reference. Rows with
top-k, top-p or min-p are read in more passes, before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.sampling.decision_table import DecisionTable
from workers.sampling.triton.noise import LEAST_NOISE, MOST_NOISE, gumbel, packed_chords, row_key
from workers.sampling.triton.rows import TILE, Rows, ordered_bits, rows_on, warped_tile
from workers.sampling.triton.truncation import edges_of, places

_SPREAD = tl.constexpr(MOST_NOISE - LEAST_NOISE)
_NO_COLUMN = tl.constexpr(2147483647)


def winners(logits: torch.Tensor, table: DecisionTable, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each row of logits `[n, size]`, float32 `[n]`, and its token, int64 `[n]`.

    Logits are those of tokens `offset … offset + size - 1`, with contiguous rows. A row in which no token can be chosen
    has the score minus infinity.
    """
    count, size = logits.shape
    rows = rows_on(logits.device, table, size)
    bests, edges, truncations = _truncations(logits, rows, table)
    parts = torch.empty((count, rows.tiles), dtype=torch.float32, device=logits.device)
    part_columns = torch.empty((count, rows.tiles), dtype=torch.int32, device=logits.device)
    best_of_tiles[(count, rows.tiles)](
        *rows.of_logits(logits), rows.seeds, rows.positions, packed_chords(logits.device),
        truncations, bests, edges, rows.gaps, parts, part_columns, offset,
        COUNT=TILE, TRUNCATES=len(table.truncated) > 0, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    values = torch.empty(count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    join_tiles[(count,)](
        parts, part_columns, values, tokens, rows.tiles, offset, TILES=triton.next_power_of_2(rows.tiles)
    )
    return values, tokens


def _truncations(
    logits: torch.Tensor, rows: Rows, table: DecisionTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit and place of the last kept token of each truncated row, and the truncation's index of each row."""
    count = len(table.truncated)
    edges = torch.zeros(count, dtype=torch.int64, device=logits.device)
    orders = torch.full((count,), torch.iinfo(torch.int32).min, dtype=torch.int32, device=logits.device)
    indices = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
    if not count:
        return orders, edges, indices
    largest_logits[(count, rows.tiles)](
        *rows.of_logits(logits), rows.truncated, orders, indices, COUNT=TILE, num_warps=8
    )
    bests = torch.where(orders < 0, orders ^ 0x7FFFFFFF, orders).view(torch.float32)
    with_limits, with_shares = bool((table.limits < logits.shape[1]).any()), bool((table.shares < 1.0).any())
    if with_limits or with_shares:
        edges = edges_of(logits, rows, bests, with_limits=with_limits, with_shares=with_shares)
    return bests, edges, indices


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
            is_column = is_column & (places(value, column) >= tl.load(edges + index))
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
