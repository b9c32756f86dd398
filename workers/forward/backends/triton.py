"""Attention over the pool's blocks by Triton kernels (`workers.forward.triton.attention`), in and out of CUDA graphs.

Rows of up to 64 tokens (decoding, chains, trees) have small tiles of queries, and keys in splits. Wider rows (prompt
chunks) have larger tiles and no splits. A row's computation depends on the row alone: it has the same bits in a graph,
outside of one, and beside any others.
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
    latent_groups,
    register_backend,
)
from workers.forward.layout import RowShape, blocks_read, slots_of
from workers.forward.padded_step import PaddedStep, RowPadding, WindowBlocks
from workers.forward.projections import Projections
from workers.forward.triton.tiles import NO_QUERY, Blocks, Queries, most_splits, wide_tile
from workers.kv.eight_bits import STORED_TYPES
from workers.kv.groups import AttentionWindow
from workers.kv.spec import LayerShape
from workers.transfer import IntegerArray, to_device_together

if TYPE_CHECKING:
    from workers.forward.triton.eight_bits import StoredLayer

WORD = 64
"""Bits of a word, and most tokens of a row that has small tiles."""
_NARROW_TILE = 4
"""Queries of a tile of rows of up to 64 tokens."""

CAPABILITIES = Capabilities(
    steps=frozenset({StepKind.RAGGED, StepKind.PADDED}),
    features=frozenset(
        {
            Feature.WINDOWS,
            Feature.SINKS,
            Feature.TREES,
            Feature.SOFT_CAP,
            Feature.LEARNED_SINKS,
            Feature.LATENTS,
        },
    ),
    devices=frozenset({"cuda"}),
    kv_types=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    stored_types=frozenset(STORED_TYPES.values()),
    head_sizes=range(16, 257),
    latent_sizes=range(2, 577),
    most_heads_per_kv=32,
    block_sizes=frozenset(1 << exponent for exponent in range(4, 9)),
    is_batch_invariant=True,
    skips_unused_blocks=True,
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


@register_backend("triton", CAPABILITIES, preference=15)
class TritonBackend(AttentionBackend[TritonStep]):
    """The kernels over the pool of one model. Opening it raises `BackendUnavailable` without the package `triton`."""

    def __init__(self, setting: AttentionSetting) -> None:
        try:
            from workers.forward.triton import attention, eight_bits, kv_write, rotary
        except ImportError as error:
            raise BackendUnavailable(f"the package triton is not installed: {error}") from error
        self._attention, self._kv_write, self._rotary = attention, kv_write, rotary
        self._layer_of = eight_bits.layer_of
        self._store = setting.store
        self._device = setting.device
        self._caps = [shape.soft_cap for shape in setting.layers]
        self._set_tiles(setting.layers)

    def _set_tiles(self, layers: Sequence[LayerShape]) -> None:
        """Choose how heads and queries are divided among programs."""
        self._layers = layers
        self._groups = [None if one.latent_dim is None else latent_groups(one.heads_per_kv) for one in layers]
        self._kv_heads = max(groups or one.kv_heads for one, groups in zip(layers, self._groups, strict=True))
        self._wide_tile = min(
            wide_tile(one.heads_per_kv // (groups or 1), one.value_dim)
            for one, groups in zip(layers, self._groups, strict=True)
        )
        self._narrow_tile = _NARROW_TILE if not any(self._groups) else 1

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
        parts = [_Part(rows, firsts, self._narrow_tile, is_wide=False), _Part(rows, firsts, self._wide_tile)]
        parts = [part for part in parts if part.members]
        arrays = [np.array([list(chain.from_iterable(table)) for table in slots], dtype=np.int64)]
        for part in parts:
            arrays += [*part.arrays, np.zeros(len(part.arrays[0]) * self._kv_heads, dtype=np.int64)]
            for window in windows:
                arrays += part.seen(window)
        for table, window in read:
            arrays += _blocks(rows, table, window, size)
        sent = iter(to_device_together(arrays, self._device))
        slot_tensor = next(sent)
        queries: dict[AttentionWindow, list[Queries]] = {window: [] for window in windows}
        for part in parts:
            items, tokens, starts, arrivals = (next(sent).int() for _ in range(4))
            for window, found in queries.items():
                last, positions, words = next(sent).int(), next(sent).int(), next(sent)
                found.append(
                    Queries(
                        items,
                        tokens,
                        last,
                        positions,
                        words,
                        starts,
                        tile=part.tile,
                        arrivals=arrivals,
                        is_wide=part.is_wide,
                        splits=part.splits(size, window),
                    )
                )
        return TritonStep(slot_tensor, queries, {key: self._received(sent) for key in read})

    def plan_padded(self, step: PaddedStep) -> TritonStep:
        """Tiles and blocks of rows of one width, of which each has so many tiles and splits as the longest may need."""
        width = step.padding.gather.shape[1]
        tokens = torch.arange(len(step.padding.scatter), dtype=torch.int32, device=step.slots.device)
        is_padding = (step.padding.scatter == 0) & (tokens > 0)
        queries: dict[AttentionWindow, list[Queries]] = {}
        blocks: dict[tuple[int, AttentionWindow], Blocks] = {}
        for window, read in step.windows.items():
            last, positions, words = (part.flatten()[step.padding.scatter] for part in _seen(read))
            last = last.masked_fill(is_padding, NO_QUERY)
            items = _tiles(step.padding, min(width, self._narrow_tile))
            queries[window] = [
                Queries(
                    items=items,
                    tokens=tokens,
                    last=last.int(),
                    positions=positions.int(),
                    words=words[:, None],
                    starts=read.sees.stored.int(),
                    tile=self._narrow_tile,
                    is_wide=False,
                    arrivals=items.new_zeros(len(items) * self._kv_heads),
                    splits=most_splits(read.order.shape[1], step.block_size, window),
                )
            ]
            order, counts = read.order.int(), read.counts.int()
            blocks |= {(table, window): Blocks(held.int(), order, counts) for table, held in read.blocks.items()}
        return TritonStep(step.slots, queries, blocks)

    def _received(self, sent: Iterator[torch.Tensor]) -> Blocks:
        return Blocks(*(next(sent).int() for _ in range(3)))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: TritonStep) -> None:
        """Store keys and values at the step's slots, in one launch."""
        slots = metadata.slots[self._store.kv_groups.placements[layer].table]
        is_latent = self._groups[layer] is not None
        self._kv_write.write_kv(
            _with_whole_heads(keys), _with_whole_heads(values), slots, self._stored(layer), is_latent=is_latent
        )

    def write_rotated(self, layer: int, fresh: Projections, metadata: TritonStep) -> torch.Tensor:
        """Rotate queries and keys, and store keys and values, in one launch."""
        slots = metadata.slots[self._store.kv_groups.placements[layer].table]
        return self._rotary.rotate_and_write(fresh, slots, self._stored(layer))

    def _stored(self, layer: int) -> StoredLayer:
        scales = None if self._store.stored is None else self._store.scales_of(layer)
        return self._layer_of(self._store.of(layer), scales)

    def attend(self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None) -> torch.Tensor:
        """Attend to the blocks of each row: one launch for narrow rows, one for wide ones."""
        return self._attend(layer, queries, metadata, scaling, None)

    def attend_with_sinks(
        self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None, sinks: torch.Tensor
    ) -> torch.Tensor:
        """Attend with a learned logit of each head in the softmax."""
        return self._attend(layer, queries, metadata, scaling, sinks)

    def _attend(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: TritonStep,
        scaling: float | None,
        learned_sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        placement = self._store.kv_groups.placements[layer]
        queries = _with_whole_heads(queries)
        output = queries.new_empty((*queries.shape[:2], self._layers[layer].value_dim))
        stored = self._stored(layer)
        for plan in metadata.queries[placement.window]:
            self._attention.paged_attention(
                queries,
                stored,
                plan,
                metadata.blocks[placement.table, placement.window],
                output,
                scale=queries.shape[2] ** -0.5 if scaling is None else scaling,
                window=placement.window.size or 0,
                sinks=placement.window.sinks,
                soft_cap=self._caps[layer],
                learned_sinks=learned_sinks,
                latent_groups=self._groups[layer],
            )
        return output


def _tiles(padding: RowPadding, tile: int) -> torch.Tensor:
    """The tiles of all rows, int32 `[tiles, 3]`: row, first query, number of queries.

    The number is 0 behind a row's end and in padding rows, which nothing is computed for.
    """
    rows, width = padding.gather.shape
    first, last = padding.gather[:, :1], padding.gather[:, -1:]  # a row's last token is repeated behind its end
    row = torch.arange(rows, device=first.device)[:, None]
    is_real = padding.scatter[first] == row * width  # padding rows name the token of another row
    begin = torch.arange(0, width, tile, device=first.device)
    counts = torch.where(is_real, last - first + 1 - begin, 0).clamp(0, tile)  # [rows, tiles of a row]
    return torch.stack((row.expand_as(counts), first + begin, counts), -1).view(-1, 3).int()


def _seen(read: WindowBlocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last stored position that each query sees, its own position, and its word, `[rows, queries]` each."""
    sees = read.sees
    return (sees.stored[:, None] - 1).expand_as(sees.position), sees.position, sees.seen


def _with_whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor `[tokens, heads, dim]`, with contiguous heads."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Part:
    """The rows of a step that are computed alike, as arrays of integers."""

    def __init__(self, rows: Sequence[RowShape], firsts: IntegerArray, tile: int, *, is_wide: bool = True) -> None:
        """The wide rows or the narrow ones, in tiles of so many queries."""
        self.is_wide = is_wide
        self.members = [index for index, row in enumerate(rows) if (row.width > WORD) is self.is_wide]
        self.tile = tile
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

    def splits(self, size: int, window: AttentionWindow) -> int:
        """The most splits of a row."""
        return 1 if self.is_wide else most_splits(max(-(-row.end // size) for row in self._rows), size, window)

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
