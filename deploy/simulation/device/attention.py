"""The attention of a step on the fake device: planned as ever, with launches that are counted instead of made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deploy.simulation.device.fake_device import Kernel, KernelCounter
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.triton import TritonBackend, TritonStep
from workers.forward.graph_sizes import WORD
from workers.forward.layout import RowShape
from workers.forward.projections import Projections
from workers.forward.triton.tiles import SPLIT_KEYS
from workers.kv.eight_bits import record_bytes

FLOAT_BYTES = 4


class CountedAttention(TritonBackend):
    """The Triton backend, which plans as ever, and counts launches instead of making them."""

    def __init__(self, setting: AttentionSetting, counter: KernelCounter) -> None:
        self._bind(setting)
        self._counter = counter
        self.rows: Sequence[RowShape] = ()
        """The rows of the step, which a graph does not know."""
        self.kv_bytes = 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: TritonStep,
        scaling: float | None,  # noqa: ARG002 - part of the interface
    ) -> torch.Tensor:
        shape, placement = self._layers[layer], self._store.kv_groups.placements[layer]
        heads, dim, element, of_value = queries.shape[1], queries.shape[2], queries.element_size(), shape.value_dim
        own = len(queries) * heads * (dim + of_value) * element
        size = placement.window.size
        read = sum(row.end if size is None else min(row.end, row.width + size) for row in self.rows)
        token = self._token_bytes(layer, element)
        read *= token
        seen = sum(_seen(row, size) for row in self.rows)
        self.kv_bytes += read + sum(row.width for row in self.rows) * token
        for index, plan in enumerate(metadata.queries[placement.window]):
            first = index == 0
            splits = sum(_split_queries(row, size) for row in self.rows) if first and not plan.is_wide else 0
            parts = splits * heads * (of_value + 2) * FLOAT_BYTES
            flops = 2 * heads * (dim + of_value) * seen * first
            self._counter.add(Kernel("attend_tiles", (own + read) * first + 2 * parts, flops))
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


def _seen(row: RowShape, window: int | None) -> int:
    """Pairs of a query of a row and a position that it sees."""
    ends = range(row.stored_len + 1, row.end + 1)
    return sum(ends) if window is None else sum(min(end, window) for end in ends)


def _split_queries(row: RowShape, window: int | None) -> int:
    """The splits of each query of a row whose keys are divided, together: each is written, read and joined."""
    keys = row.end if window is None else min(row.end, row.width + window)
    splits = -(-keys // SPLIT_KEYS)
    return row.width * splits if row.width <= WORD and splits > 1 else 0
