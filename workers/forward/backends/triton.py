"""Attention over the pool's blocks by Triton kernels (`workers.forward.triton.attention`), for steps of any size.

Rows of up to 64 tokens (decoding, chains, trees) have small tiles of queries, and keys in splits. Wider rows (prompt
chunks) have larger tiles and no splits. A row's computation depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from cluster.core.tree import ROOT
from workers.forward.backends.base import (
    AttentionBackend,
    AttentionSetting,
    BackendUnavailable,
    Capabilities,
    Feature,
    StepKind,
    register_backend,
)
from workers.forward.layout import RowShape, blocks_read, slots_of
from workers.kv.groups import AttentionWindow
from workers.transfer import IntegerArray, to_device_together

if TYPE_CHECKING:
    from workers.forward.triton.attention import Blocks, Queries

WORD = 64
"""Bits of a word, and most tokens of a row that has small tiles."""
_NARROW_TILE, _WIDE_TILE = 4, 16
"""Queries of a tile. With four query heads per KV head, these are products of 16 and 64 rows."""

CAPABILITIES = Capabilities(
    steps=frozenset({StepKind.RAGGED}),
    features=frozenset({Feature.WINDOWS, Feature.SINKS, Feature.TREES}),
    devices=frozenset({"cuda"}),
    kv_types=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_sizes=range(16, 257),
    most_heads_per_kv=32,
    block_sizes=frozenset(1 << exponent for exponent in range(4, 9)),
    is_batch_invariant=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class TritonStep:
    """The metadata of a step."""

    slots: torch.Tensor
    """int64 `[tables, tokens]`: where each token's key and value are stored."""
    queries: dict[AttentionWindow, list[Queries]]
    """By window, the queries of narrow rows and those of wide rows, where there are any."""
    blocks: dict[tuple[int, AttentionWindow], Blocks]
    """By block table and window."""


@register_backend("triton", CAPABILITIES, preference=5)
class TritonBackend(AttentionBackend[TritonStep]):
    """The kernels over the pool of one model. Opening it raises `BackendUnavailable` without the package `triton`."""

    def __init__(self, setting: AttentionSetting) -> None:
        try:
            from workers.forward.triton import attention
        except ImportError as error:
            raise BackendUnavailable(f"the package triton is not installed: {error}") from error
        self._kernels = attention
        self._store = setting.store
        self._device = setting.device

    def plan(self, rows: Sequence[RowShape]) -> TritonStep:
        """Tiles and blocks of ragged rows, copied to the device in one piece."""
        groups = self._store.kv_groups
        size, tables = groups.layout.block_size, groups.layout.tables
        slots = [
            [slots_of(row.blocks[table], row.stored_len, row.end, size) for row in rows] for table in range(tables)
        ]
        read = dict.fromkeys((placement.table, placement.window) for placement in groups.placements)
        windows = dict.fromkeys(window for _, window in read)
        firsts = np.cumsum([0, *(row.width for row in rows)])
        parts = [_Part(rows, firsts, is_wide=is_wide) for is_wide in (False, True)]
        parts = [part for part in parts if part.members]
        arrays = [np.array([list(chain.from_iterable(table)) for table in slots], dtype=np.int64)]
        for part in parts:
            arrays += part.arrays
            for window in windows:
                arrays += part.seen(window)
        for table, window in read:
            arrays += _blocks(rows, table, window, size)
        sent = iter(to_device_together(arrays, self._device))
        slot_tensor = next(sent)
        queries: dict[AttentionWindow, list[Queries]] = {window: [] for window in windows}
        for part in parts:
            items, tokens, starts = (next(sent).int() for _ in part.arrays)
            for found in queries.values():
                last, positions, words = next(sent).int(), next(sent).int(), next(sent)
                splits = part.splits(size, self._kernels.SPLIT_KEYS)
                found.append(self._kernels.Queries(items, tokens, last, positions, words, starts, part.tile, splits))
        return TritonStep(slot_tensor, queries, {key: self._received(sent) for key in read})

    def _received(self, sent: Iterator[torch.Tensor]) -> Blocks:
        return self._kernels.Blocks(*(next(sent).int() for _ in range(3)))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: TritonStep) -> None:
        """Store keys and values at the step's slots."""
        self._store.write(layer, metadata.slots[self._store.kv_groups.placements[layer].table], keys, values)

    def attend(self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None) -> torch.Tensor:
        """Attend to the blocks of each row: one launch for narrow rows, one for wide ones."""
        placement = self._store.kv_groups.placements[layer]
        queries = queries if queries.stride(-1) == 1 else queries.contiguous()
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for plan in metadata.queries[placement.window]:
            self._kernels.paged_attention(
                queries,
                self._store.of(layer),
                plan,
                metadata.blocks[placement.table, placement.window],
                output,
                scale=queries.shape[2] ** -0.5 if scaling is None else scaling,
                window=placement.window.size or 0,
                sinks=placement.window.sinks,
            )
        return output


class _Part:
    """The rows of a step that are computed alike, as arrays of integers."""

    def __init__(self, rows: Sequence[RowShape], firsts: IntegerArray, *, is_wide: bool) -> None:
        self.members = [index for index, row in enumerate(rows) if (row.width > WORD) is is_wide]
        self.tile = _WIDE_TILE if is_wide else _NARROW_TILE
        self._is_wide = is_wide
        self._rows = [rows[index] for index in self.members]
        items: list[tuple[int, int, int]] = []
        query = 0
        for index, row in zip(self.members, self._rows, strict=True):
            firsts_of_tiles = range(0, row.width, self.tile)
            items += [(index, query + first, min(self.tile, row.width - first)) for first in firsts_of_tiles]
            query += row.width
        tokens = [np.arange(firsts[index], firsts[index + 1]) for index in self.members]
        starts = [row.base_len for row in rows]
        self.arrays: list[IntegerArray] = [
            np.array(items, dtype=np.int64).reshape(-1, 3),
            np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, dtype=np.int64),
            np.array(starts, dtype=np.int64),
        ]
        """Tiles `[tiles, 3]`, the token of each query, and the position of the first tree node of each row."""

    def splits(self, size: int, keys: int) -> int:
        """Splits of the row with the most keys."""
        return 1 if self._is_wide else max(-(-(-(-row.end // size) * size) // keys) for row in self._rows)

    def seen(self, window: AttentionWindow) -> list[IntegerArray]:
        """The last committed position that each query sees, its own position, and its words of tree nodes."""
        last: list[int] = []
        positions: list[int] = []
        words: list[int] = []
        for row in self._rows:
            last += [*range(row.stored_len, row.base_len), *[row.base_len - 1] * len(row.tree)]
            positions += row.positions()
            words += [0] * row.fresh + _ancestors(row, window)
        count = -(-max(len(row.tree) for row in self._rows) // WORD)
        parts = [[_signed(word >> (WORD * part)) for part in range(count)] for word in words]
        found = [np.array(values, dtype=np.int64) for values in (last, positions, parts)]
        return [*found[:2], found[2].reshape(len(words), count)]


def _ancestors(row: RowShape, window: AttentionWindow) -> list[int]:
    """For each tree node the bits of itself and its ancestors within the window."""
    words: list[int] = []
    depths = row.tree.depths()
    for node, parent in enumerate(row.tree.parents):
        seen = (0 if parent == ROOT else words[parent]) | 1 << node
        words.append(seen)
    if window.size is not None:
        for node, depth in enumerate(depths):
            kept = (other for other in range(node + 1) if depth - depths[other] < window.size)
            words[node] &= sum(1 << other for other in kept)
    return words


def _signed(word: int) -> int:
    """The lowest 64 bits as a signed number."""
    word &= (1 << WORD) - 1
    return word - (1 << WORD) if word >> (WORD - 1) else word


def _blocks(rows: Sequence[RowShape], table: int, window: AttentionWindow, size: int) -> list[IntegerArray]:
    """The blocks that each row reads, their order in the sequence, and their number, padded to the most."""
    order = []
    for row in rows:
        sinks, first, end = blocks_read(row, window, size)
        order.append([*range(sinks), *range(first, end)])
    most = max(map(len, order))
    padded = np.zeros((2, len(rows), most), dtype=np.int64)
    for index, (row, places) in enumerate(zip(rows, order, strict=True)):
        padded[0, index, : len(places)] = [row.blocks[table][place] for place in places]
        padded[1, index, : len(places)] = places
    return [padded[0], padded[1], np.array(list(map(len, order)), dtype=np.int64)]
