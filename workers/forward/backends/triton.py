"""Attention over the pool's blocks by Triton kernels (`workers.forward.triton.attention`), in and out of CUDA graphs.

Rows of up to 64 tokens (decoding, chains, trees) have small tiles of queries, and keys in splits. Wider rows (prompt
chunks) have larger tiles and no splits. A row's computation depends on the row alone: it has the same bits in a graph,
outside of one, and beside any others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    PackedPlan,
    StepKind,
    latent_groups,
    register_backend,
    with_whole_heads,
)
from workers.forward.graph_sizes import WORD, GraphSize
from workers.forward.layout import RowShape, StepRows, blocks_read
from workers.forward.projections import Projections
from workers.forward.triton.tiles import (
    HOPPER,
    NO_QUERY,
    Blocks,
    Queries,
    capability_of,
    most_splits,
    narrow_tile,
    padded_width,
    tall_tile,
    wide_tile,
)
from workers.kv.eight_bits import STORED_TYPES
from workers.kv.groups import AttentionWindow
from workers.transfer import IntegerArray, StepArray, to_device_together

if TYPE_CHECKING:
    from workers.forward.triton.eight_bits import StoredLayer

_MOST_SUMS = 256 << 20
"""Most bytes of the sums of splits of a launch outside of CUDA graphs, unless those of one row take more. There are as
many splits as the row with the most has, for each query: beside one long row, short ones would take gigabytes."""
_FLOAT_BYTES = 4

CAPABILITIES = Capabilities(
    steps=frozenset({StepKind.RAGGED}),
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
    packs_steps=True,
    prompts=(WORD + 1,),
)


@dataclass(frozen=True, slots=True, eq=False)
class TritonStep:
    """The metadata of a step."""

    slots: torch.Tensor
    """int64 `[tables, tokens]`: where each token's key and value are stored."""
    queries: dict[AttentionWindow, list[Queries]]
    """By window, the queries of narrow rows, in one part or several, and those of wide rows, where there are any."""
    blocks: dict[tuple[int, AttentionWindow], Blocks]
    """By block table and window."""
    is_padded: bool
    """Whether some tokens may be padding, as in a CUDA graph."""


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
        self._bind(setting)

    def _bind(self, setting: AttentionSetting) -> None:
        """Choose how heads and queries are divided among programs."""
        self._store, self._device, self._scratch = setting.store, setting.device, setting.scratch
        self._layers = layers = setting.layers
        self._caps = [shape.soft_cap for shape in layers]
        self._groups = [None if one.latent_dim is None else latent_groups(one.heads_per_kv) for one in layers]
        self._kv_heads = max(groups or one.kv_heads for one, groups in zip(layers, self._groups, strict=True))
        self._wide_tile = min(
            wide_tile(one.heads_per_kv // (groups or 1), one.value_dim)
            for one, groups in zip(layers, self._groups, strict=True)
        )
        # Others are not proved to have the same bits in tiles of both sizes, or would move registers to memory.
        is_proved = (
            capability_of(self._device) >= HOPPER
            and setting.store.stored in {None, torch.int8}
            and (setting.dtype is not torch.float32 or self._device.type != "cuda")
            and not any(one.soft_cap or one.has_learned_sinks for one in layers)
        )
        tile_of = tall_tile if is_proved else narrow_tile
        narrow = min(tile_of(one.heads_per_kv, one.value_dim) for one in layers)
        self._narrow_tile = 1 if any(self._groups) else narrow
        self._split_bytes = _FLOAT_BYTES * max(
            one.kv_heads * one.heads_per_kv * (padded_width(one.value_dim) + 2) for one in layers
        )
        """Bytes of the sums of a query's split."""
        placements = self._store.kv_groups.placements
        self._read = tuple(dict.fromkeys((placement.table, placement.window) for placement in placements))
        """The block tables, each with the windows through which layers see it."""
        self._windows = tuple(dict.fromkeys(window for _, window in self._read))

    def _computes(self, row: RowShape) -> bool:  # noqa: ARG002 - for backends that derive from this one
        """Whether these kernels compute the row. They store the keys and values of every row."""
        return True

    def plan(self, rows: Sequence[RowShape]) -> TritonStep:
        """Tiles and blocks of ragged rows, copied to the device in one piece."""
        planned = self.plan_packed(rows)
        return planned.metadata(to_device_together(planned.arrays, self._device))

    def plan_packed(self, rows: Sequence[RowShape], size: GraphSize | None = None) -> PackedPlan[TritonStep]:
        """Tiles and blocks of ragged rows; of no rows in a graph, as many of both as any step of its size has."""
        layout, read, windows = self._store.kv_groups.layout, self._read, self._windows
        block_size = layout.block_size
        rows = StepRows.of(rows)
        columns = rows.columns
        own = [index for index, row in enumerate(rows) if self._computes(row)]
        is_wide = (columns.widths > WORD).tolist()
        narrow, wide = ([index for index in own if is_wide[index] is kind] for kind in (False, True))
        batches = [narrow] if size is not None else self._batches(rows, narrow, windows)
        parts = [_Part(rows, batch, self._narrow_tile, size, is_wide=False) for batch in batches]
        if wide if size is None else size.has_wide_rows:
            parts.append(_Part(rows, wide, self._wide_tile, size, is_wide=True))
        if rows or size is None:
            arrays: list[StepArray] = [columns.flat_slots(layout.tables, block_size)]
        else:
            arrays = [np.full((layout.tables, size.tokens), self._scratch * block_size, dtype=np.int64)]
        for part in parts:
            arrays += [*part.arrays(), np.zeros(part.tiles * self._kv_heads, dtype=np.int32)]
            arrays += [part.words(window) for window in windows]
        for table, window in read:
            arrays += _blocks(rows, table, window, block_size, size)

        def metadata(sent: Sequence[torch.Tensor]) -> TritonStep:
            found = iter(sent)
            slots = next(found)
            queries: dict[AttentionWindow, list[Queries]] = {window: [] for window in windows}
            for part in parts:
                items, tokens, starts, last, positions, arrivals = (next(found) for _ in range(6))
                for window, tiles in queries.items():
                    splits = part.splits(block_size, window)
                    words = next(found)
                    tiles.append(
                        Queries(
                            items, tokens, last, positions, words, starts, part.tile, part.is_wide, arrivals, splits
                        )
                    )
            return TritonStep(slots, queries, {key: _received(found, key[1]) for key in read}, size is not None)

        return PackedPlan(arrays, metadata)

    def _batches(
        self, rows: Sequence[RowShape], narrow: Sequence[int], windows: Iterable[AttentionWindow]
    ) -> list[list[int]]:
        """The rows `narrow`, divided into launches whose sums of splits take at most `_MOST_SUMS`."""
        block_size = self._store.kv_groups.layout.block_size
        counts = {index: max(_splits([rows[index]], one, block_size) for one in windows) for index in narrow}
        batches: list[list[int]] = []
        queries = splits = 0
        for index in sorted(narrow, key=counts.__getitem__, reverse=True):
            queries += rows[index].width
            if not batches or queries * splits * self._split_bytes > _MOST_SUMS:
                batches.append([])
                queries, splits = rows[index].width, counts[index]
            batches[-1].append(index)
        return [sorted(batch) for batch in batches]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: TritonStep) -> None:
        """Store keys and values at the step's slots, in one launch."""
        slots = metadata.slots[self._store.kv_groups.placements[layer].table]
        is_latent = self._groups[layer] is not None
        self._kv_write.write_kv(
            with_whole_heads(keys), with_whole_heads(values), slots, self._stored(layer), is_latent=is_latent
        )

    def write_rotated(self, layer: int, fresh: Projections, metadata: TritonStep) -> torch.Tensor:
        """Rotate queries and keys, and store keys and values, in one launch."""
        slots = metadata.slots[self._store.kv_groups.placements[layer].table]
        return self._rotary.rotate_and_write(fresh, slots, self._stored(layer))

    def _stored(self, layer: int) -> StoredLayer:
        scales = None if self._store.stored is None else self._store.scales_of(layer)
        return self._layer_of(self._store.of(layer), scales)

    def attend(self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None) -> torch.Tensor:
        """Attend to the blocks of each row: one launch for narrow rows, unless some are long, and one for wide ones."""
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
        queries = with_whole_heads(queries)
        shape = (*queries.shape[:2], self._layers[layer].value_dim)
        # From the first layer on, padding is NaN: no router chooses experts for it, whose weights would be read.
        is_first = metadata.is_padded and layer == 0
        output = queries.new_full(shape, math.nan) if is_first else queries.new_empty(shape)
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


def _received(found: Iterator[torch.Tensor], window: AttentionWindow) -> Blocks:
    """The blocks that rows read through a window. Without one, they are those from the first to the last."""
    blocks, counts = next(found), next(found)
    if window.size is not None:
        return Blocks(blocks, next(found), counts)
    order = torch.arange(blocks.shape[1], dtype=torch.int32, device=blocks.device)
    return Blocks(blocks, order.repeat(len(blocks), 1), counts)


class _Part:
    """The rows of a step that are computed alike, as arrays of integers: the wide ones or the others."""

    def __init__(
        self, rows: StepRows, members: Sequence[int], tile: int, size: GraphSize | None, *, is_wide: bool
    ) -> None:
        """`members` are the rows of this part, by index. `tile` is the number of queries of a program. Without rows,
        there is room for any step of the graph of this `size`.
        """
        self.is_wide, self.tile = is_wide, tile
        self._size, self._all = size, rows.columns
        self._rows = [rows[index] for index in members]
        self._members = np.array(members, dtype=np.int64)
        self._own: IntegerArray | slice = slice(None)  # which tokens of the step are of these rows
        if len(members) < len(rows):
            is_member = np.zeros(len(rows), dtype=np.bool_)
            is_member[self._members] = True
            self._own = np.flatnonzero(is_member[self._all.rows])
        widths = self._all.widths[self._members]
        tiles = -(-widths // tile)
        owners = np.repeat(np.arange(len(members)), tiles)
        begins = (np.arange(len(owners)) - (np.cumsum(tiles) - tiles)[owners]) * tile
        self._items = np.empty((len(owners), 3), dtype=np.int32)
        self._items[:, 0] = self._members[owners]
        self._items[:, 1] = (np.cumsum(widths) - widths)[owners] + begins
        self._items[:, 2] = np.minimum(tile, widths[owners] - begins)
        query = int(widths.sum())
        self.tiles, self.queries = len(self._items), query
        self._starts = len(rows)
        if size is not None and not rows:
            self._starts, self.queries = size.rows, size.tokens if is_wide else size.narrow
            most = min(size.rows, self.queries // (WORD + 1 if is_wide else 1))
            self.tiles = min(self.queries, (self.queries + (tile - 1) * most) // tile)

    def splits(self, block_size: int, window: AttentionWindow) -> int:
        """The most splits of a row."""
        if self.is_wide:
            return 1
        if self._size is not None:
            return most_splits(self._size.blocks_of(window, block_size), block_size, window)
        return _splits(self._rows, window, block_size)

    def arrays(self) -> list[StepArray]:
        """Tiles `[tiles, 3]`; the token of each query; the position of the first tree node of each row of the step; the
        last committed position that each query sees, and its own position. A tile without queries is padding."""
        step, own = self._all, self._own
        last = positions = step.positions[own]
        if len(step.trees.places):
            last = np.where(step.is_node[own], step.base_lens[step.rows[own]] - 1, positions)
        tokens = np.arange(len(positions)) if isinstance(own, slice) else own
        return [
            _filled(self._items, self.tiles),
            _filled(tokens.astype(np.int32), self.queries),
            _filled(step.base_lens.astype(np.int32), self._starts),
            _filled(last.astype(np.int32), self.queries, NO_QUERY),
            _filled(positions.astype(np.int32), self.queries),
        ]

    def words(self, window: AttentionWindow) -> StepArray:
        """For each query the words of the tree nodes that it sees. Rows that are not wide have one at least."""
        step, own = self._all, self._own
        if not len(step.trees.places):
            return np.zeros((self.queries, 0 if self.is_wide else 1), dtype=np.int64)
        is_node = step.is_node[own]
        nodes: IntegerArray | slice = own  # which nodes of the step are of these rows
        if not isinstance(own, slice):
            nodes = (np.cumsum(step.is_node) - 1)[own[is_node]]
        sizes = step.trees.sizes[self._members]
        count = max(0 if self.is_wide else 1, -(-int(sizes.max(initial=0)) // WORD))
        seen = step.ancestors[nodes, :count].view(np.int64)
        if window.size is not None and int(step.trees.depths[nodes].max(initial=0)) > window.size:
            listed = [word for row in self._rows for word in _ancestors(row, window)]
            seen = np.array(
                [[_signed(word >> (WORD * part)) for part in range(count)] for word in listed], dtype=np.int64
            ).reshape(len(listed), count)
        found = np.zeros((self.queries, count), dtype=np.int64)
        found[: len(is_node)][is_node, : seen.shape[1]] = seen
        return found


def _splits(rows: Sequence[RowShape], window: AttentionWindow, block_size: int) -> int:
    """The most splits of one of the rows."""
    read = (blocks_read(row, window, block_size) for row in rows)
    return most_splits(max(sinks + end - first for sinks, first, end in read), block_size, window)


def _filled(found: StepArray, length: int, padding: int = 0) -> StepArray:
    """The array, lengthened to this length."""
    if len(found) == length:
        return found
    whole = np.full((length, *found.shape[1:]), padding, dtype=found.dtype)
    whole[: len(found)] = found
    return whole


def _ancestors(row: RowShape, window: AttentionWindow) -> list[int]:
    """For each tree node the bits of itself and its ancestors within the window or among the sinks."""
    words: list[int] = []
    for node, parent in enumerate(row.tree.parents):
        seen = (0 if parent == ROOT else words[parent]) | 1 << node
        words.append(seen)
    if window.size is not None and row.tree.depth() > window.size:
        places = row.positions()[row.fresh :]
        for node, place in enumerate(places):
            kept = (other for other in range(node + 1) if window.sees(place, places[other]))
            words[node] &= sum(1 << other for other in kept)
    return words


def _signed(word: int) -> int:
    """The lowest 64 bits as a signed number."""
    word &= (1 << WORD) - 1
    return word - (1 << WORD) if word >> (WORD - 1) else word


def _blocks(
    rows: StepRows, table: int, window: AttentionWindow, block_size: int, size: GraphSize | None
) -> list[StepArray]:
    """The blocks that each row reads, their number, and under a window their order in the sequence."""
    sinks, firsts, ends = rows.columns.blocks_read(window, block_size)
    counts = sinks + ends - firsts
    if rows or size is None:
        blocks = np.zeros((len(rows), int(counts.max())), dtype=np.int32)
    else:
        blocks = np.zeros((size.rows, size.blocks_of(window, block_size)), dtype=np.int32)
    order = blocks if window.size is None else np.zeros_like(blocks)
    for index, row, kept, first, end in zip(
        range(len(rows)), rows, *(one.tolist() for one in (sinks, firsts, ends)), strict=True
    ):
        held, own = row.blocks[table], slice(kept, kept + end - first)
        blocks[index, own] = held[first:end]
        if kept:
            blocks[index, :kept] = held[:kept]
        if order is not blocks:
            order[index, :kept], order[index, own] = np.arange(kept), np.arange(first, end)
    found = [blocks, _filled(counts.astype(np.int32), len(blocks))]
    return found if window.size is None else [*found, order]
