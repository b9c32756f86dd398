"""A step's rows as index tensors: where each token is stored, and which stored ones it sees.

Built once per step, shared by all layers: so it is flat lists and numpy here, and one copy to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster.core.ids import BlockId
from cluster.core.tree import ROOT, TokenTree
from workers.forward.flex_attention import BlockView
from workers.kv.groups import AttentionWindow, KvCacheGroups
from workers.kv.transfer import IntegerArray, to_device

_LONGEST_PADDED_ROW = 32  # rows at least this wide are not padded against others


@dataclass(frozen=True, slots=True)
class RowShape:
    """What attention must know of a row: its blocks, how much is stored, how much is fresh."""

    blocks: Sequence[Sequence[BlockId]]
    """As in `BlockTable`."""
    stored_len: int
    fresh: int
    """Committed tokens in this step; they see everything up to themselves."""
    tree: TokenTree
    """Guesses below the last fresh token; each sees the committed tokens and its ancestors."""

    @property
    def width(self) -> int:
        return self.fresh + len(self.tree)

    @property
    def base_len(self) -> int:
        return self.stored_len + self.fresh

    @property
    def end(self) -> int:
        return self.stored_len + self.width

    def positions(self) -> list[int]:
        """Absolute position of each query; tree nodes of one depth share theirs."""
        committed = list(range(self.stored_len, self.base_len))
        return committed + [self.base_len + depth - 1 for depth in self.tree.depths()]


@dataclass(slots=True)
class RowGroup:
    """Rows that share one padded attention call."""

    gather: torch.Tensor  # [rows, queries] index into the step's tokens; padding repeats the row's last
    scatter: torch.Tensor  # [tokens] flat index into [rows * queries]
    targets: torch.Tensor  # [tokens] where those outputs belong in the step; not asked for where it has no other group
    blocks: dict[tuple[int, AttentionWindow], torch.Tensor]  # (table, what is seen of it) → [rows, blocks]
    masks: dict[AttentionWindow, torch.Tensor]  # [rows, queries, keys] true where a query sees a key
    is_whole: bool
    """Its rows are all of the step, in order and without padding: there is nothing to gather or to scatter."""
    views: dict[tuple[int, AttentionWindow], BlockView] = field(default_factory=dict)
    """As `blocks`, for attention without gathering; where there are such there are no masks."""
    _folded: dict[tuple[int, AttentionWindow, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def folded_mask(self, heads_per_kv: int, window: AttentionWindow, dtype: torch.dtype) -> torch.Tensor:
        """What to add to the logits of queries folded over the heads of one KV head.

        `[rows, 1, heads * queries, keys]`, 0 where a key is seen.
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
class StepLayout:
    """Everything attention needs for one forward pass, the same for every layer."""

    slots: torch.Tensor  # [tables, tokens] where each token's key and value are stored
    groups: list[RowGroup]


def build_step_layout(rows: Sequence[RowShape], kv_groups: KvCacheGroups, device: torch.device) -> StepLayout:
    """Turn rows into index tensors. Tokens of the step are the rows' tokens, one row after another."""
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
    drafts = [
        _RowGroupBuilder(
            [rows[index] for index in members], [first_token[index] for index in members], kv_groups, len(rows)
        )
        for members in _bucket_rows(rows, size)
    ]
    arrays = [np.array(slots, dtype=np.int64).reshape(-1, tokens)]
    for draft in drafts:
        arrays.extend(draft.arrays)
    tensors = iter(_send(arrays, device))
    return StepLayout(next(tensors), [draft.build([next(tensors) for _ in draft.arrays]) for draft in drafts])


def slots_of(blocks: Sequence[BlockId], start: int, end: int, size: int) -> list[int]:
    """Flat indices (block * block_size + offset) of positions `start … end - 1`."""
    return [blocks[position // size] * size + position % size for position in range(start, end)]


def blocks_read(row: RowShape, window: AttentionWindow, size: int) -> tuple[int, int, int]:
    """Which blocks of `size` tokens some token of this step sees: the first so many (sinks), then from … up to."""
    first = window.first_visible(row.stored_len) // size
    return min(first, -(-window.sinks // size)), first, -(-row.end // size)


def _bucket_rows(rows: Sequence[RowShape], block_size: int) -> list[list[int]]:
    """Indices of rows that may be padded against each other without wasting more than half."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        if row.width >= _LONGEST_PADDED_ROW:
            buckets[(-1, index)] = [index]
            continue
        blocks = -(-row.end // block_size)
        # Widths are padded to the next power of four: a tree and a lone token cost the same memory traffic.
        key = ((row.width - 1).bit_length() // 2, (blocks - 1).bit_length())
        buckets.setdefault(key, []).append(index)
    return list(buckets.values())


def _send(arrays: Sequence[IntegerArray], device: torch.device) -> list[torch.Tensor]:
    """All arrays in one copy."""
    whole = to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = torch.split(whole, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class _RowGroupBuilder:
    """A `RowGroup` whose numbers are not on the device yet."""

    def __init__(self, rows: list[RowShape], first_token: list[int], kv_groups: KvCacheGroups, step_rows: int) -> None:
        self._rows = rows
        self._step_rows = step_rows
        self._size = kv_groups.layout.block_size
        self._places = list(dict.fromkeys((place.table, place.window) for place in kv_groups.placements))
        self._windows = list(dict.fromkeys(window for _, window in self._places))
        width = np.array([row.width for row in rows])
        queries = np.arange(width.max())
        # A padded query repeats the row's last one, so that it sees something, too.
        index = np.minimum(queries, width[:, None] - 1)  # [rows, queries]
        gather = np.array(first_token)[:, None] + index
        real = queries < width[:, None]
        position = np.array([row.stored_len for row in rows])[:, None] + index
        limit = position.copy()  # the last key that a query sees; a branching tree's own keys are added afterwards
        self._trees = [place for place, row in enumerate(rows) if not row.tree.is_chain]
        for place in self._trees:
            row = rows[place]
            nodes = slice(row.fresh, row.width)
            position[place, nodes] = row.positions()[row.fresh :]
            limit[place, nodes] = row.base_len + ROOT
        self.arrays: list[IntegerArray] = [gather, np.flatnonzero(real), gather[real], position, limit]
        for window in self._windows:
            self._read(window)

    def _read(self, window: AttentionWindow) -> None:
        """Which blocks of the rows are read: those that some query of this step sees."""
        size = self._size
        read = [blocks_read(row, window, size) for row in self._rows]
        most = max(kept + end - begin for kept, begin, end in read)
        tables = [table for table, seen in self._places if seen == window]
        blocks = np.zeros((len(tables), len(self._rows), most), dtype=np.int64)
        for place, (row, (kept, begin, end)) in enumerate(zip(self._rows, read, strict=True)):
            for index, table in enumerate(tables):
                held = row.blocks[table]
                if kept:
                    blocks[index, place, :kept] = held[:kept]
                blocks[index, place, kept : kept + end - begin] = held[begin:end]
        sinks, first, _ = np.array(read, dtype=np.int64).T
        self.arrays += [blocks, sinks, first - sinks, self._tree_keys(window, most * size, first - sinks)]

    def _tree_keys(self, window: AttentionWindow, keys: int, skipped: IntegerArray) -> IntegerArray:
        """Flat indices into `[rows, queries, keys]` where nodes of branching trees see their ancestors."""
        queries = self.arrays[0].shape[1]
        seen: list[int] = []
        for place in self._trees:
            row = self._rows[place]
            depths, parents = row.tree.depths(), row.tree.parents
            for node, depth in enumerate(depths):
                line = (place * queries + row.fresh + node) * keys + row.base_len - int(skipped[place]) * self._size
                other = node
                while other != ROOT:
                    if window.sees(row.base_len + depth - 1, row.base_len + depths[other] - 1):
                        seen.append(line + other)
                    other = parents[other]
        return np.array(seen, dtype=np.int64)

    def build(self, tensors: list[torch.Tensor]) -> RowGroup:
        """`tensors` are `arrays`, on the device."""
        gather, scatter, targets, position, limit = tensors[:5]
        found: dict[tuple[int, AttentionWindow], torch.Tensor] = {}
        masks: dict[AttentionWindow, torch.Tensor] = {}
        for index, window in enumerate(self._windows):
            blocks, sinks, skipped, tree_keys = tensors[5 + 4 * index : 9 + 4 * index]
            tables = [table for table, seen in self._places if seen == window]
            found.update({(table, window): blocks[place] for place, table in enumerate(tables)})
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
        return RowGroup(gather, scatter, targets, found, masks, whole)
