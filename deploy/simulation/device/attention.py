"""The attention of a step on the fake device: planned as ever, with launches that are counted instead of made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deploy.simulation.device.fake_device import Kernel, KernelCounter
from workers.forward.backends.base import AttentionSetting, latent_groups
from workers.forward.backends.triton import TritonBackend, TritonStep
from workers.forward.graph_sizes import WORD
from workers.forward.layout import RowShape
from workers.forward.projections import Projections
from workers.forward.triton.tiles import SPLIT_KEYS
from workers.kv.eight_bits import record_bytes

FLOAT_BYTES = 4
NARROW, WIDE = "attend_tiles", "attend_wide_tiles"
"""The launches of the kernel for rows of up to 64 tokens, and for wider ones."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What the attention of a layer does for a query and for a token. Its kernels follow from the rows of a step."""

    query_bytes: int
    """Bytes of one query of all heads and of its result."""
    part_bytes: int
    """Bytes of the result of one split of a query, for all heads."""
    token_bytes: int
    """Bytes of a stored key and value, or of a stored latent."""
    pair_flops: int
    """Operations of a query and a key, of all heads."""
    tile: int
    """Queries of a program for rows of up to 64 tokens."""
    readers: int
    """Programs of a tile that read the same keys: groups of heads that share a latent."""
    window: int | None


class CountedAttention(TritonBackend):
    """The Triton backend, which plans as ever, and counts launches instead of making them."""

    def __init__(self, setting: AttentionSetting, counter: KernelCounter) -> None:
        self._bind(setting)
        self._counter = counter
        self.rows: Sequence[RowShape] = ()
        """The rows of the step, which a graph does not know."""
        self.kv_bytes = 0
        self.layers: list[LayerAttention] = []
        """The attention of each layer that attended, in the order of the layers."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: TritonStep,
        scaling: float | None,  # noqa: ARG002 - part of the interface
    ) -> torch.Tensor:
        shape, placement = self._layers[layer], self._store.kv_groups.placements[layer]
        heads, dim, element, of_value = queries.shape[1], queries.shape[2], queries.element_size(), shape.value_dim
        of = LayerAttention(
            query_bytes=heads * (dim + of_value) * element,
            part_bytes=heads * (of_value + 2) * FLOAT_BYTES,
            token_bytes=self._token_bytes(layer, element),
            pair_flops=2 * heads * (dim + of_value),
            tile=self._narrow_tile,
            readers=1 if shape.latent_dim is None else latent_groups(shape.heads_per_kv),
            window=placement.window.size,
        )
        self.layers.append(of)
        self.kv_bytes += sum(_keys(row, of.window) + row.width for row in self.rows) * of.token_bytes
        counted: set[bool] = set()
        for plan in metadata.queries[placement.window]:
            rows = [row for row in self.rows if (row.width > WORD) is plan.is_wide and plan.is_wide not in counted]
            self._counter.add(_wide(rows, of) if plan.is_wide else _narrow(rows, of))
            counted.add(plan.is_wide)
        return queries.new_empty((*queries.shape[:2], of_value))

    def _token_bytes(self, layer: int, element: int) -> int:
        """Bytes of a token's key and value, or of its latent, as they are stored."""
        shape = self._layers[layer]
        numbers = shape.kv_heads * shape.head_dim * element
        return shape.records * (numbers if self._store.stored is None else record_bytes(shape))

    def attend_with_sinks(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: TritonStep,
        scaling: float | None,
        sinks: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        return self.attend(layer, queries, metadata, scaling)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: TritonStep) -> None:  # noqa: ARG002
        written = (keys, values)[: self._layers[layer].records]
        size = sum(part.numel() * part.element_size() for part in written)
        self._counter.add(Kernel("store_tokens", size + len(keys) * self._token_bytes(layer, keys.element_size())))

    def write_rotated(
        self,
        layer: int,
        fresh: Projections,
        metadata: TritonStep,  # noqa: ARG002 - part of the interface
    ) -> torch.Tensor:
        element = fresh.keys.element_size()
        rotated = 2 * sum(part.numel() * part.element_size() for part in (fresh.queries, fresh.cosines))
        read = (fresh.keys.numel() + fresh.values.numel()) * element
        written = len(fresh.keys) * self._token_bytes(layer, element)
        self._counter.add(Kernel("rotate_token", rotated + read + written))
        return fresh.queries.new_empty((len(fresh.queries), fresh.queries.shape[1] // fresh.dim, fresh.dim))


def attention_kernels(rows: Sequence[RowShape], of: LayerAttention) -> list[Kernel]:
    """What a layer launches to attend in a step of these rows: a kernel for narrow rows, and one for wider ones."""
    narrow, wide = [row for row in rows if row.width <= WORD], [row for row in rows if row.width > WORD]
    return [*([_narrow(narrow, of)] if narrow else ()), *([_wide(wide, of)] if wide else ())]


def _narrow(rows: Sequence[RowShape], of: LayerAttention) -> Kernel:
    """The kernel of rows of up to 64 tokens. Each tile of queries reads the keys of its row."""
    moved = 0
    for row in rows:
        keys = _keys(row, of.window)
        splits = -(-keys // SPLIT_KEYS)
        parts = 2 * of.part_bytes * splits * row.width if splits > 1 else 0  # written, and read by the last program
        moved += keys * of.token_bytes * -(-row.width // of.tile) * of.readers + row.width * of.query_bytes + parts
    longest = max((min(SPLIT_KEYS, _keys(row, of.window)) for row in rows), default=0)
    return Kernel(NARROW, moved, sum(_seen(row, of.window) for row in rows) * of.pair_flops, steps=longest)


def _wide(rows: Sequence[RowShape], of: LayerAttention) -> Kernel:
    """The kernel of wider rows. That tiles read keys again is in what it achieves of its operations."""
    moved = sum(_keys(row, of.window) * of.token_bytes + row.width * of.query_bytes for row in rows)
    return Kernel(WIDE, moved, sum(_seen(row, of.window) for row in rows) * of.pair_flops)


def _keys(row: RowShape, window: int | None) -> int:
    """Positions that the queries of a row see."""
    return row.end if window is None else min(row.end, row.width + window)


def _seen(row: RowShape, window: int | None) -> int:
    """Pairs of a query of a row and a position that it sees."""
    ends = range(row.stored_len + 1, row.end + 1)
    return sum(ends) if window is None else sum(min(end, window) for end in ends)
