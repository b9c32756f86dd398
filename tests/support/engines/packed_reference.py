"""The planning of the Triton backend with attention in plain torch, query by query: it needs no GPU."""

from __future__ import annotations

import torch

from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.triton import CAPABILITIES, TritonBackend, TritonStep
from workers.forward.triton.tiles import Blocks, Queries


class PackedReference(TritonBackend):
    """Computes what the tiles of a step say. What no tile computes is NaN."""

    def __init__(self, setting: AttentionSetting) -> None:
        self._bind(setting)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: TritonStep) -> None:
        self._store.write(layer, metadata.slots[self._store.kv_groups.placements[layer].table], keys, values)

    def write_rotated(self, layer: int, fresh: object, metadata: TritonStep) -> torch.Tensor:
        raise NotImplementedError

    def attend(self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None) -> torch.Tensor:
        placement, shape = self._store.kv_groups.placements[layer], self._layers[layer]
        output = queries.new_full((*queries.shape[:2], shape.value_dim), torch.nan)
        blocks = metadata.blocks[placement.table, placement.window]
        for plan in metadata.queries[placement.window]:
            for row, first, count in plan.items.tolist():
                for query in range(first, first + count):
                    slots, sees = self._seen(plan, blocks, row, query, layer)
                    stored = self._store.read(layer, slots // self._size, queries.dtype)
                    keys, values = (one.flatten(0, 1) for one in stored)
                    token = int(plan.tokens[query])
                    grouped = queries[token].view(shape.kv_heads, -1, queries.shape[2])
                    products = torch.einsum("hgd,khd->hgk", grouped, keys)
                    products = products * (queries.shape[2] ** -0.5 if scaling is None else scaling)
                    weights = products.masked_fill(~sees, -torch.inf).softmax(-1)
                    output[token] = torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)
        return output

    @property
    def _size(self) -> int:
        return self._store.kv_groups.layout.block_size

    def _seen(
        self, plan: Queries, blocks: Blocks, row: int, query: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first slots of a row's blocks `[blocks]`, and which of their positions the query sees."""
        window = self._store.kv_groups.placements[layer].window
        count = int(blocks.counts[row])
        key = (blocks.order[row, :count, None] * self._size + torch.arange(self._size)).flatten()
        sees = key <= plan.last[query]
        if window.size is not None:
            sees &= (plan.positions[query] - key < window.size) | (key < window.sinks)
        bit = key - plan.starts[row]
        for number in range(plan.words.shape[1]):
            own = bit - 64 * number
            sees |= (own >= 0) & (own < 64) & ((plan.words[query, number] >> own.clamp(0, 63)) & 1 != 0)
        return blocks.blocks[row, :count].long() * self._size, sees


def packing(setting: AttentionSetting) -> ChosenBackend:
    """Attention of packed rows."""
    return ChosenBackend("packed reference", PackedReference(setting), CAPABILITIES)
