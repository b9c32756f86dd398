"""Steps whose rows are gathered: rows of similar width and length are padded to one group with one mask.

The metadata is built once per step with lists and numpy, copied to the device in one piece, and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster.core.tree import ROOT
from workers.forward.layout import RowShape, blocks_read, slots_of, source_of
from workers.forward.padded_step import RowPadding
from workers.kv.groups import AttentionWindow, KvCacheGroups
from workers.transfer import IntegerArray, to_device, to_device_together

_LONGEST_PADDED_ROW = 32  # rows at least this wide form a group of their own

RelativeBias = Callable[[torch.Tensor], torch.Tensor]
"""(relative positions `[rows, queries, keys]`) → biases `[rows, heads, queries, keys]`."""


@dataclass(slots=True)
class RowGroup:
    """Rows that are padded to one width and share one attention call."""

    padding: RowPadding
    targets: torch.Tensor  # [tokens] where the outputs belong in the step; unused if the step has one group
    blocks: dict[tuple[int, AttentionWindow], torch.Tensor]  # (table, window) → [rows, blocks]
    masks: dict[AttentionWindow, torch.Tensor]  # [rows, queries, keys] true where a query sees a key
    relative: dict[AttentionWindow, torch.Tensor] = field(default_factory=dict)
    """`[rows, queries, keys]` key position minus query position, if a model needs it."""
    biases: dict[tuple[AttentionWindow, RelativeBias], torch.Tensor] = field(default_factory=dict)
    """`[rows, kv_heads, heads_per_kv * queries, keys]`: masks with biases of relative positions."""
    _folded: dict[tuple[int, AttentionWindow, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def folded_mask(self, heads_per_kv: int, window: AttentionWindow, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask for queries that are folded over the heads of one KV head.

        `[rows, 1, heads * queries, keys]`: 0 where the query sees the key, -inf elsewhere.
        """
        key = (heads_per_kv, window, dtype)
        if key not in self._folded:
            mask = self.masks[window]
            rows, queries, keys = mask.shape
            added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            folded = added[:, None].expand(rows, heads_per_kv, queries, keys).reshape(rows, 1, -1, keys)
            self._folded[key] = folded
        return self._folded[key]


@dataclass(slots=True)
class GatheredStep:
    """Attention metadata of one forward pass, shared by all layers."""

    slots: torch.Tensor  # [tables, tokens] slot mapping: where each token's key and value are stored
    groups: list[RowGroup]


def gather_rows(
    rows: Sequence[RowShape], kv_groups: KvCacheGroups, device: torch.device, *, relative: bool = False
) -> GatheredStep:
    """Build the attention metadata. The tokens of the step are the rows' tokens, one row after another.

    `relative` adds the relative positions of keys and queries.
    """
    size = kv_groups.layout.block_size
    first_token: list[int] = []
    tokens = 0
    for row in rows:
        first_token.append(tokens)
        tokens += row.width
    slots = [
        slot
        for table in range(kv_groups.layout.tables)
        for row in rows
        for slot in slots_of(row.blocks[table], row.stored_len, row.end, size)
    ]
    builders = []
    for members in _bucket_rows(rows, size):
        shapes, firsts = [rows[index] for index in members], [first_token[index] for index in members]
        builders.append(_RowGroupBuilder(shapes, firsts, kv_groups, len(rows), relative))
    arrays = [np.array(slots, dtype=np.int64).reshape(-1, tokens)]
    for builder in builders:
        arrays.extend(builder.arrays)
    tensors = iter(to_device_together(arrays, device))
    return GatheredStep(next(tensors), [builder.build([next(tensors) for _ in builder.arrays]) for builder in builders])


def gather_sources(rows: Sequence[RowShape], kv_groups: KvCacheGroups, device: torch.device) -> GatheredStep:
    """Build the metadata of all rows as one or several groups of similar width and length."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        blocks = -(-source_of(row, kv_groups.layout.tables).length // kv_groups.layout.block_size)
        buckets.setdefault(((row.width - 1).bit_length() // 2, (blocks - 1).bit_length()), []).append(index)
    groups = [_source_group(members, rows, kv_groups, device) for members in buckets.values()]
    return GatheredStep(torch.empty(0, dtype=torch.long, device=device), groups)


def _bucket_rows(rows: Sequence[RowShape], block_size: int) -> list[list[int]]:
    """Group the indices of rows of similar width and length, so that padding wastes at most half."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        if row.width >= _LONGEST_PADDED_ROW:
            buckets[(-1, index)] = [index]
            continue
        blocks = -(-row.end // block_size)
        # Widths share a bucket up to the next power of four: memory traffic dominates, and it depends on the keys.
        key = ((row.width - 1).bit_length() // 2, (blocks - 1).bit_length())
        buckets.setdefault(key, []).append(index)
    return list(buckets.values())


class _RowGroupBuilder:
    """Computes the arrays of a `RowGroup` on the host, and builds the group from their copies on the device."""

    def __init__(
        self,
        rows: list[RowShape],
        first_token: list[int],
        kv_groups: KvCacheGroups,
        step_rows: int,
        relative: bool = False,
    ) -> None:
        self._rows = rows
        self._step_rows = step_rows
        self._size = kv_groups.layout.block_size
        self._table_windows = list(dict.fromkeys((layer.table, layer.window) for layer in kv_groups.placements))
        self._windows = list(dict.fromkeys(window for _, window in self._table_windows))
        width = np.array([row.width for row in rows])
        queries = np.arange(width.max())
        # A padded query repeats the row's last token, so that its softmax is over at least one key.
        index = np.minimum(queries, width[:, None] - 1)  # [rows, queries]
        gather = np.array(first_token)[:, None] + index
        real = queries < width[:, None]
        position = np.array([row.stored_len for row in rows])[:, None] + index
        limit = position.copy()  # the last key that a query sees; _tree_keys adds the keys of branching trees
        self._trees = [row_index for row_index, row in enumerate(rows) if not row.tree.is_chain]
        for row_index in self._trees:
            row = rows[row_index]
            nodes = slice(row.fresh, row.width)
            position[row_index, nodes] = row.positions()[row.fresh :]
            limit[row_index, nodes] = row.base_len + ROOT
        self.arrays: list[IntegerArray] = [gather, np.flatnonzero(real), gather[real], position, limit]
        for window in self._windows:
            self._add_window(window)
        self._is_relative = relative
        if relative:
            self.arrays += [self._key_positions(window) for window in self._windows]

    def _key_positions(self, window: AttentionWindow) -> IntegerArray:
        """The position of each gathered key, `[rows, keys]`: tree nodes of one depth have the same."""
        size = self._size
        read = np.array([blocks_read(row, window, size) for row in self._rows])
        kept, begin, end = (part[:, None] for part in read.T)
        keys = np.arange((kept + end - begin).max() * size)
        positions = np.where(keys < kept * size, keys, keys + (begin - kept) * size)
        for row_index in self._trees:
            row = self._rows[row_index]
            first = row.base_len - int((begin - kept)[row_index, 0]) * size
            positions[row_index, first : first + len(row.tree)] = row.positions()[row.fresh :]
        return positions

    def _add_window(self, window: AttentionWindow) -> None:
        """Add the arrays of one window: the blocks that the rows read, and the visible keys inside trees."""
        size = self._size
        read = [blocks_read(row, window, size) for row in self._rows]
        most = max(kept + end - begin for kept, begin, end in read)
        tables = [table for table, seen in self._table_windows if seen == window]
        blocks = np.zeros((len(tables), len(self._rows), most), dtype=np.int64)
        for row_index, (row, (kept, begin, end)) in enumerate(zip(self._rows, read, strict=True)):
            for index, table in enumerate(tables):
                held = row.blocks[table]
                if kept:
                    blocks[index, row_index, :kept] = held[:kept]
                blocks[index, row_index, kept : kept + end - begin] = held[begin:end]
        sinks, first, _ = np.array(read, dtype=np.int64).T
        self.arrays += [blocks, sinks, first - sinks, self._tree_keys(window, most * size, first - sinks)]

    def _tree_keys(self, window: AttentionWindow, keys: int, skipped: IntegerArray) -> IntegerArray:
        """Flat indices into `[rows, queries, keys]` at which nodes of branching trees see their ancestors."""
        queries = self.arrays[0].shape[1]
        seen: list[int] = []
        for row_index in self._trees:
            row = self._rows[row_index]
            depths, parents = row.tree.depths(), row.tree.parents
            for node, depth in enumerate(depths):
                query_index = row_index * queries + row.fresh + node
                first_key = query_index * keys + row.base_len - int(skipped[row_index]) * self._size
                other = node
                while other != ROOT:
                    if window.sees(row.base_len + depth - 1, row.base_len + depths[other] - 1):
                        seen.append(first_key + other)
                    other = parents[other]
        return np.array(seen, dtype=np.int64)

    def build(self, tensors: list[torch.Tensor]) -> RowGroup:
        """Build the group. `tensors` are `arrays` on the device."""
        gather, scatter, targets, position, limit = tensors[:5]
        found: dict[tuple[int, AttentionWindow], torch.Tensor] = {}
        masks: dict[AttentionWindow, torch.Tensor] = {}
        for index, window in enumerate(self._windows):
            blocks, sinks, skipped, tree_keys = tensors[5 + 4 * index : 9 + 4 * index]
            tables = [table for table, seen in self._table_windows if seen == window]
            found.update({(table, window): blocks[table_index] for table_index, table in enumerate(tables)})
            key = torch.arange(blocks.shape[2] * self._size, device=blocks.device)
            if window.size is None:
                mask = key <= limit[:, :, None]
            else:
                key = key + torch.where(key >= sinks[:, None] * self._size, skipped[:, None] * self._size, 0)
                near = position[:, :, None] - key[:, None] < window.size  # [rows, queries, keys]
                mask = (key[:, None] <= limit[:, :, None]) & (near | (key[:, None] < window.sinks))
            if len(tree_keys):
                mask.view(-1).index_fill_(0, tree_keys, True)
            masks[window] = mask
        whole = len(self._rows) == self._step_rows and gather.numel() == len(targets)
        group = RowGroup(RowPadding(gather, scatter, whole), targets, found, masks)
        if self._is_relative:
            keys = zip(self._windows, tensors[-len(self._windows) :], strict=True)
            group.relative = {window: key[:, None] - position[:, :, None] for window, key in keys}
        return group


def _source_group(
    members: Sequence[int], rows: Sequence[RowShape], kv_groups: KvCacheGroups, device: torch.device
) -> RowGroup:
    """The rows `members`, padded to one width and to one length of their sources."""
    size, tables = kv_groups.layout.block_size, kv_groups.layout.tables
    sources = [source_of(rows[index], tables) for index in members]
    first_token = [0, *np.cumsum([row.width for row in rows]).tolist()]
    width = np.array([rows[index].width for index in members])
    queries = np.arange(width.max())
    gather = np.array([first_token[index] for index in members])[:, None] + np.minimum(queries, width[:, None] - 1)
    real = queries < width[:, None]
    length = np.array([source.length for source in sources])
    used = -(-length // size)
    blocks = np.zeros((tables, len(members), int(used.max())), dtype=np.int64)
    for row, source in enumerate(sources):
        for table in range(tables):
            blocks[table, row, : used[row]] = source.blocks[table][: used[row]]
    keys = torch.arange(int(used.max()) * size, device=device)
    seen = keys < to_device(length, device)[:, None, None]  # [rows, 1, keys]
    mask = seen.expand(len(members), len(queries), len(keys))
    held = to_device(blocks, device)
    is_whole = len(members) == len(rows) and gather.size == int(width.sum())
    return RowGroup(
        padding=RowPadding(to_device(gather, device), to_device(np.flatnonzero(real), device), is_whole),
        targets=to_device(gather[real], device),
        blocks={(layer.table, layer.window): held[layer.table] for layer in kv_groups.placements},
        masks={layer.window: mask for layer in kv_groups.placements},  # of the text: all tokens see the whole source
    )
