"""The rows of a step: their blocks, their stored lengths and their tokens.

Every attention backend plans a step from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.ids import BlockId
from cluster.core.tree import TokenTree
from workers.kv.groups import AttentionWindow


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
        return self.fresh + len(self.tree)

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
