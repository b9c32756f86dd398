"""Decisions by kernels: logits processors, Gumbel noise and argmax in one pass over the logits.

Here is what the host does for them: what it copies to the device, and in which order it launches which kernel. The
tokens are those of `workers.sampling.decide`, whose functions on PyTorch's operators are the reference. Rows with
top-k, top-p or min-p are read in more passes, before. Ranks that have parts of the vocabulary add up what these passes
sum of each digit of a logit, and decide alone which of the tokens with the smallest logit that is kept they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch

from workers.sampling.decision_table import NO_LIMIT, WORD, DecisionTable
from workers.sampling.parts import DIGIT_BITS as SHARED_BITS
from workers.sampling.parts import Parts
from workers.transfer import to_device_together

TILE = 4096
"""Columns or entries of a tile of a row."""
PLACE_BITS = 54
"""Bits of a token's place among those of its row: the 32 of the order of its logit, then those of its column."""
DIGIT_BITS = 11
_SHIFTS = (44, 33, 22, 11, 0)
"""Bits below each digit of a place. The first three have the whole logit."""
_SHARED_SHIFTS = (46, 38, 30, 22)
"""Bits below the digits of `SHARED_BITS` of a place's logit."""
_COLUMN_SHIFTS = (11, 0)


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
        """The arguments that all kernels over logits have first."""
        return (
            logits, self.temperatures, self.masks, self.excluded, self.ends, self.columns, self.factors, self.terms,
            logits.shape[1], logits.stride(0), self.column_tiles,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """The search for the last tokens that top-k and top-p keep, of all truncated rows."""

    bests: torch.Tensor
    """float32 `[truncated rows]`: the largest warped logits."""
    edges: torch.Tensor
    """int64 `[truncated rows]`: the places of those tokens; 0 where all are kept."""
    prefixes: torch.Tensor
    """int64 `[truncated rows]`: the digits that are found."""
    wanted: torch.Tensor
    """int64 `[truncated rows]`: what is to be reached below these digits."""
    sums: torch.Tensor
    """int64 `[truncated rows, bins of a digit]`"""
    offset: int
    """The token of the first logit."""


class DecisionKernels(Protocol):
    """The kernels that decide. Each method launches one; the host waits for none of them."""

    def exclude_entries(
        self, excluded: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """Set the bits of `columns` `[entries]` in the masks `excluded` of their `rows` `[entries]`."""

    def largest_logits(self, logits: torch.Tensor, rows: Rows, orders: torch.Tensor, indices: torch.Tensor) -> None:
        """Put the largest logit of each truncated row into `orders`, as an integer in its order.

        `indices` `[rows]` get the number of each row's truncation.
        """

    def sum_digits(self, logits: torch.Tensor, rows: Rows, search: Search, *, by_mass: bool, shift: int) -> None:
        """Add up the tokens of each truncated row, or their masses, by the digit of their places above `shift`."""

    def choose_digits(self, rows: Rows, search: Search, *, by_mass: bool, shift: int) -> None:
        """Choose the digit with which the sums reach what is wanted, and empty the sums."""

    def best_of_tiles(
        self,
        logits: torch.Tensor,
        rows: Rows,
        truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        parts: tuple[torch.Tensor, torch.Tensor],
        offset: int,
    ) -> None:
        """Put the best score of each tile, and the lowest column that has it, into `parts` `[rows, tiles]`.

        `truncation` are the largest logits, the edges, and the index of each row's truncation.
        """

    def join_tiles(
        self, parts: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor], offset: int
    ) -> None:
        """Put the best score of each row, and the lowest token that has it, into `found` `[rows]`."""


def winners(
    kernels: DecisionKernels, logits: torch.Tensor, table: DecisionTable, offset: int, parts: Parts | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each row of logits `[n, size]`, float32 `[n]`, and its token, int64 `[n]`.

    Logits are those of tokens `offset … offset + size - 1`, with contiguous rows. A row in which no token can be chosen
    has the score minus infinity. With `parts`, rows are truncated among the logits of all ranks, which call this
    together.
    """
    count, size = logits.shape
    rows = rows_on(logits.device, table, size, kernels)
    truncation = _truncations(kernels, logits, rows, table, offset, parts)
    tiles = _scores_and_tokens(logits.device, (count, rows.tiles), torch.int32)
    kernels.best_of_tiles(logits, rows, truncation, tiles, offset)
    found = _scores_and_tokens(logits.device, (count,), torch.int64)
    kernels.join_tiles(tiles, found, offset)
    return found


def rows_on(device: torch.device, table: DecisionTable, size: int, kernels: DecisionKernels) -> Rows:
    """Copy a table for logits `[n, size]` to the device in one piece."""
    arrays = {field.name: getattr(table, field.name) for field in fields(table) if field.name != "mask_count"}
    integers = [array.view(np.int64 if array.itemsize == 8 else np.int32) for array in arrays.values()]
    found = {
        name: part.view(torch.from_numpy(array).dtype)
        for (name, array), part in zip(arrays.items(), to_device_together(integers, device), strict=True)
    }
    masks = torch.zeros((table.mask_count, -(-size // WORD)), dtype=torch.int32, device=device)
    masks.view(-1)[: table.excluded.size].copy_(found["excluded"].flatten())
    if len(table.columns):
        kernels.exclude_entries(masks, found["masks"], found["rows"], found["columns"])
    found["excluded"] = masks
    del found["rows"]
    return Rows(**found, column_tiles=-(-size // TILE), entry_tiles=-(-table.most_entries // TILE))


def _truncations(
    kernels: DecisionKernels,
    logits: torch.Tensor,
    rows: Rows,
    table: DecisionTable,
    offset: int,
    parts: Parts | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit and place of the last kept token of each truncated row, and the truncation's index of each row."""
    count = len(table.truncated)
    edges = torch.zeros(count, dtype=torch.int64, device=logits.device)
    orders = torch.full((count,), torch.iinfo(torch.int32).min, dtype=torch.int32, device=logits.device)
    indices = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
    if not count:
        return orders, edges, indices
    kernels.largest_logits(logits, rows, orders, indices)
    if parts is not None:
        orders = parts.all_gather(orders).amax(dim=0)
    bests = torch.where(orders < 0, orders ^ 0x7FFFFFFF, orders).view(torch.float32)
    searches = [False] * bool((table.limits < NO_LIMIT).any()) + [True] * bool((table.shares < 1.0).any())
    if searches:
        prefixes, wanted = torch.zeros_like(edges), torch.zeros_like(edges)
        sums = torch.zeros((count, 1 << DIGIT_BITS), dtype=torch.int64, device=logits.device)
        search = Search(bests, edges, prefixes, wanted, sums, offset)
        _find_edges(kernels, logits, rows, search, parts, searches)
    return bests, edges, indices


def _find_edges(
    kernels: DecisionKernels,
    logits: torch.Tensor,
    rows: Rows,
    search: Search,
    parts: Parts | None,
    searches: Sequence[bool],
) -> None:
    """Find the edges. `searches` has `False` if some rows have top-k, then `True` if some have top-p."""
    for by_mass in searches:
        if parts is not None:
            _find_last_logits(kernels, logits, rows, search, parts, by_mass=by_mass)
        for shift in _SHIFTS if parts is None else _COLUMN_SHIFTS:
            kernels.sum_digits(logits, rows, search, by_mass=by_mass, shift=shift)
            kernels.choose_digits(rows, search, by_mass=by_mass, shift=shift)


def _find_last_logits(
    kernels: DecisionKernels,
    logits: torch.Tensor,
    rows: Rows,
    search: Search,
    parts: Parts,
    *,
    by_mass: bool,
) -> None:
    """Find the smallest logits that are kept of all parts.

    What is wanted then is what is left for this part's tokens with that logit, after those of the parts before it.
    """
    bins, count, device = 1 << SHARED_BITS, len(search.edges), search.edges.device
    found = torch.zeros((len(_SHARED_SHIFTS), count, bins), dtype=torch.int64, device=device)
    for shift, own in zip(_SHARED_SHIFTS, found.unbind(), strict=True):
        kernels.sum_digits(logits, rows, replace(search, sums=own), by_mass=by_mass, shift=shift)
        found = parts.all_gather(own)  # [parts, truncated rows, bins]
        kernels.choose_digits(rows, replace(search, sums=found.sum(dim=0)), by_mass=by_mass, shift=shift)
    digits = search.prefixes & (bins - 1)
    search.wanted.sub_(found[: parts.index].sum(dim=0).gather(1, digits.unsqueeze(1)).squeeze(1))


def _scores_and_tokens(
    device: torch.device, shape: tuple[int, ...], tokens: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=tokens, device=device)
