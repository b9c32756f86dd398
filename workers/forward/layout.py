"""The rows of a step: their blocks, their stored lengths and their tokens.

Every attention backend plans a step from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from cluster.core.ids import BlockId
from cluster.core.tree import TokenTree
from workers.kv.groups import AttentionWindow
from workers.sampling.tree_columns import TreeColumns
from workers.transfer import IntegerArray


@dataclass(frozen=True, slots=True)
class SourceShape:
    """The source that a row of an encoder-decoder model reads."""

    blocks: Sequence[Sequence[BlockId]]
    """The blocks with its cross-attention keys and values, of each table."""
    length: int
    """Tokens of the source."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """One row of a step: its blocks, its stored length, and its tokens in this step."""

    blocks: Sequence[Sequence[BlockId]]
    """The blocks of each table, as in `BlockTable.blocks`."""
    stored_len: int
    fresh: int
    """Committed tokens in this step. Each sees all positions up to its own."""
    tree: TokenTree
    """Drafted tokens below the last committed one. Each sees the committed tokens and its ancestors."""
    source: SourceShape | None = None
    """What every token of the row sees by cross-attention; `None` without an encoder."""

    @property
    def width(self) -> int:
        """Number of tokens in this step, tree nodes included."""
        return self.fresh + len(self.tree.tokens)

    @property
    def base_len(self) -> int:
        """Length of the sequence after the committed tokens of this step."""
        return self.stored_len + self.fresh

    @property
    def end(self) -> int:
        """Number of slots in use after this step: stored tokens, committed tokens and tree nodes."""
        return self.stored_len + self.width

    def positions(self) -> list[int]:
        """Absolute position of each token. Tree nodes of the same depth have the same position."""
        committed = list(range(self.stored_len, self.base_len))
        return committed + [self.base_len + depth - 1 for depth in self.tree.depths()]


class StepRows(tuple[RowShape, ...]):
    """The rows of a step, with their columns."""

    @classmethod
    def of(cls, rows: Sequence[RowShape]) -> StepRows:
        """The rows themselves if they are a `StepRows`, whose columns may be computed already."""
        return rows if isinstance(rows, cls) else cls(rows)

    @cached_property
    def columns(self) -> StepColumns:
        """The rows as columns of numbers, computed once."""
        return StepColumns(self)


class StepColumns:
    """The rows of a step as columns of numbers. Its tokens are the rows' tokens, one row after another."""

    def __init__(self, rows: Sequence[RowShape]) -> None:
        self._rows = rows
        self.trees = TreeColumns([row.tree for row in rows])
        """The rows' trees. Their nodes are the tokens of which `is_node` is true, in order."""
        self.stored: IntegerArray = np.array([row.stored_len for row in rows], dtype=np.int64)
        """`[rows]`: the stored length."""
        self.fresh: IntegerArray = np.array([row.fresh for row in rows], dtype=np.int64)
        """`[rows]`: committed tokens in this step."""
        self.widths: IntegerArray = self.fresh + self.trees.sizes
        """`[rows]`: tokens in this step."""
        self.firsts: IntegerArray = np.cumsum(self.widths) - self.widths
        """`[rows]`: the first token of each row."""
        self.rows: IntegerArray = np.repeat(np.arange(len(rows)), self.widths)
        """`[tokens]`: the row of each token."""
        places = np.arange(len(self.rows)) - self.firsts[self.rows]
        self.stored_at: IntegerArray = self.stored[self.rows] + places
        """`[tokens]`: where among the positions of its sequence the keys and values of each token are stored."""
        has_nodes = len(self.trees.places) > 0
        self.is_node = places >= self.fresh[self.rows] if has_nodes else np.zeros(len(places), dtype=np.bool_)
        """`[tokens]`: whether the token is drafted."""
        self.positions: IntegerArray = self.stored_at
        """`[tokens]`: absolute position. Nodes of a tree of the same depth have the same position."""
        if has_nodes and not self.trees.are_chains:
            self.positions = self.stored_at.copy()
            self.positions[self.is_node] = self.base_lens[self.trees.trees] + self.trees.depths - 1

    @cached_property
    def ancestors(self) -> npt.NDArray[np.uint64]:
        """`[nodes, words]`: each node and its ancestors as bits; see `TreeColumns.ancestors`."""
        return self.trees.ancestors()

    @cached_property
    def base_lens(self) -> IntegerArray:
        """`[rows]`: length of the sequence after the committed tokens of this step."""
        return self.stored + self.fresh

    @cached_property
    def ends(self) -> IntegerArray:
        """`[rows]`: number of slots in use after this step."""
        return self.stored + self.widths

    def flat_slots(self, tables: int, size: int) -> IntegerArray:
        """`[tables, tokens]`: where each block table stores each token: block * `size` + offset in the block."""
        begins, ends = self.stored // size, -(-self.ends // size)
        spans = list(zip(self._rows, begins.tolist(), ends.tolist(), strict=True))
        counts = ends - begins
        written = chain.from_iterable(
            row.blocks[table][begin:end] for table in range(tables) for row, begin, end in spans
        )
        blocks = np.fromiter(written, dtype=np.int64, count=tables * int(counts.sum())).reshape(tables, -1)
        shifts = np.cumsum(counts) - counts - begins  # from a block's number in its row to its place in `blocks`
        slots: IntegerArray = blocks[:, self.stored_at // size + shifts[self.rows]] * size + self.stored_at % size
        return slots

    def blocks_read(self, window: AttentionWindow, size: int) -> tuple[IntegerArray, IntegerArray, IntegerArray]:
        """`blocks_read` of all rows, `[rows]` each."""
        ends = -(-self.ends // size)
        if window.size is None:
            none = np.zeros_like(ends)
            return none, none, ends
        first = np.maximum(0, self.stored - window.size + 1) // size
        return np.minimum(first, -(-window.sinks // size)), first, ends


def slots_of(blocks: Sequence[BlockId], start: int, end: int, size: int) -> list[int]:
    """Flat indices (block * block_size + offset) of positions `start … end - 1`."""
    slots: list[int] = []
    for index in range(start // size, -(-end // size)):
        shift = (blocks[index] - index) * size  # from a position in this block to its slot
        slots.extend(range(max(start, index * size) + shift, min(end, (index + 1) * size) + shift))
    return slots


def blocks_read(row: RowShape, window: AttentionWindow, size: int) -> tuple[int, int, int]:
    """Which blocks of `size` tokens this step reads: (number of leading sink blocks, first block, end block)."""
    first = window.first_visible(row.stored_len) // size
    return min(first, -(-window.sinks // size)), first, -(-row.end // size)


def source_of(row: RowShape, tables: int) -> SourceShape:
    """The row's source. A row without one, as in warm-up, reads the first position of the first block."""
    return row.source or SourceShape([[BlockId(0)]] * tables, 1)
