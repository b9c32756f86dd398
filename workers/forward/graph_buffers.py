"""The input buffers of a CUDA graph whose rows have one width: every step of its size is copied into them.

The rest of the buffers is padding. Padding tokens are stored in a scratch block that no sequence holds, padding rows
read this block, and their results are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from cluster.core.ids import BlockId
from cluster.core.tree import ROOT
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape, blocks_read, slots_of
from workers.forward.padded_step import PaddedStep, RowPadding, VisibilityMask, WindowBlocks
from workers.forward.recurrence.plan import RecurrenceBuffers
from workers.kv.groups import AttentionWindow, KvCacheGroups
from workers.transfer import IntegerArray


class GraphBuffers:
    """The buffers of one graph size. `fill` copies a step in, and `step` shows it to attention backends."""

    def __init__(
        self,
        size: GraphSize,
        kv_groups: KvCacheGroups,
        scratch: BlockId,
        device: torch.device,
    ) -> None:
        """`scratch` is the pool's last block, which no sequence holds."""
        self.size = size
        self._kv_groups = kv_groups
        self._block_size = kv_groups.layout.block_size
        self._scratch = scratch
        self._tables = {
            window: sorted({placement.table for placement in kv_groups.placements if placement.window == window})
            for window in dict.fromkeys(placement.window for placement in kv_groups.placements)
        }
        self._shapes = self._plan()
        self._pinned = device.type == "cuda"
        self._numbers = torch.zeros(sum(map(prod, self._shapes)), dtype=torch.int64, device=device)
        parts = torch.split(self._numbers, [prod(shape) for shape in self._shapes])
        self._parts = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        self.tokens, self.positions = self._parts[0][None], self._parts[1][None]
        self.selected = self._parts[2]
        """`[1, tokens]`, `[1, tokens]`, `[selected]`."""
        self.recurrence = RecurrenceBuffers(size.rows, size.tokens, device)
        """What recurrent layers do, which is filled for models that have some."""

    def _plan(self) -> list[tuple[int, ...]]:
        """Shapes of the parts of the buffer, in the order in which `fill` and `step` use them."""
        rows, tokens = self.size.rows, self.size.tokens
        shapes: list[tuple[int, ...]] = [(tokens,), (tokens,), (self.size.selected,)]
        shapes += [(self._kv_groups.layout.tables, tokens), (tokens,), (rows,), (rows,), (rows,)]
        for window, tables in self._tables.items():
            shapes += [
                (len(tables), rows, self.size.blocks_of(window, self._block_size)),
                (rows,),
                (rows,),
                (rows,),
                (tokens,),
            ]
        return shapes

    def fill(
        self,
        rows: Sequence[RowShape],
        tokens: Sequence[int],
        positions: Sequence[int] | IntegerArray,
        selected: Sequence[int],
    ) -> None:
        """Copy a step that fits into the buffers. The host does not wait for the copy."""
        # torch does not reuse pinned memory before the copy has finished.
        host = torch.empty(self._numbers.shape, dtype=torch.int64, pin_memory=self._pinned)
        flat: IntegerArray = host.numpy()
        bounds = np.cumsum([prod(shape) for shape in self._shapes])[:-1]
        parts = iter(part.reshape(shape) for part, shape in zip(np.split(flat, bounds), self._shapes, strict=True))
        for values in (tokens, positions, selected):
            part = next(parts)
            part[: len(values)] = values
            part[len(values) :] = 0
        self._fill_rows(rows, [next(parts) for _ in range(5)])
        for window, tables in self._tables.items():
            self._fill_window(rows, window, tables, [next(parts) for _ in range(5)])
        self._numbers.copy_(host, non_blocking=True)

    def _fill_rows(self, rows: Sequence[RowShape], parts: Sequence[IntegerArray]) -> None:
        slots, scatter, first, width, stored = parts
        for part, padding in ((slots, self._scratch * self._block_size), (scatter, 0), (first, 0), (width, 1)):
            part.fill(padding)
        stored.fill(0)
        count = len(rows)
        width[:count] = [row.width for row in rows]
        stored[:count] = [row.stored_len for row in rows]
        ends = np.cumsum(width[:count])
        first[:count] = ends - width[:count]
        for index, row in enumerate(rows):
            own_tokens = slice(int(first[index]), int(ends[index]))
            scatter[own_tokens] = np.arange(row.width) + index * self.size.queries
            for table, blocks in enumerate(row.blocks):
                slots[table, own_tokens] = slots_of(blocks, row.stored_len, row.end, self._block_size)

    def _fill_window(
        self, rows: Sequence[RowShape], window: AttentionWindow, tables: Sequence[int], parts: Sequence[IntegerArray]
    ) -> None:
        blocks, sinks, skipped, counts, seen = parts
        for part, padding in ((blocks, self._scratch), (sinks, 0), (skipped, 0), (counts, 1), (seen, 1)):
            part.fill(padding)
        words: list[int] = []
        for index, row in enumerate(rows):
            kept, begin, end = blocks_read(row, window, self._block_size)
            sinks[index] = kept
            skipped[index] = begin - kept
            counts[index] = kept + end - begin
            for table_index, table in enumerate(tables):
                held = row.blocks[table]
                blocks[table_index, index, :kept] = held[:kept]
                blocks[table_index, index, kept : kept + end - begin] = held[begin:end]
            words += _visible_bits(row, window)
        seen[: len(words)] = np.array(words, dtype=np.uint64).view(np.int64)

    def step(self) -> PaddedStep:
        """The rows as attention backends read them, computed on the device from the buffers."""
        slots, scatter, first, width, stored = self._parts[3:8]
        query = torch.arange(self.size.queries, device=slots.device)
        gather = first[:, None] + torch.minimum(query, width[:, None] - 1)  # [rows, queries]
        position = self._parts[1][gather]
        windows: dict[AttentionWindow, WindowBlocks] = {}
        for index, (window, tables) in enumerate(self._tables.items()):
            blocks, sinks, skipped, counts, seen = self._parts[8 + 5 * index : 13 + 5 * index]
            order = torch.arange(blocks.shape[2], device=blocks.device)
            windows[window] = WindowBlocks(
                blocks={table: blocks[table_index] for table_index, table in enumerate(tables)},
                order=order + torch.where(order >= sinks[:, None], skipped[:, None], 0),
                counts=counts,
                sees=VisibilityMask(window, stored, position, seen[gather]),
            )
        padding = RowPadding(gather, scatter, is_whole=self.size.queries == 1)
        return PaddedStep(slots, padding, windows, self._block_size, self._scratch)


def _visible_bits(row: RowShape, window: AttentionWindow) -> list[int]:
    """For each token of the row, the tokens of the row that it sees, as bits: its ancestors and itself."""
    words: list[int] = []
    narrow = window.size is not None and row.width > window.size
    positions = row.positions() if narrow else []
    parents = [
        *range(-1, row.fresh - 1),
        *(row.fresh + (parent if parent != ROOT else -1) for parent in row.tree.parents),
    ]
    for token, parent in enumerate(parents):
        word = (words[parent] if parent >= 0 else 0) | 1 << token
        if narrow:  # a token outside this window is outside the descendants' windows too
            for other in range(token):
                if not window.sees(positions[token], positions[other]):
                    word &= ~(1 << other)
        words.append(word)
    return words
