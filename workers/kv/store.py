"""The tensors that hold the keys and values of all sequences, and where each layer's are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kv.eight_bits import dequantize, numbers_in, quantize, scales_in
from workers.kv.groups import KvCacheGroups


@dataclass(frozen=True, slots=True, eq=False)
class KvStore:
    """The blocks' content. `keys[block_layer]` and `values[block_layer]` are `[blocks, block_size, heads, dim]`.

    In 8 bits they are records, uint8 `[blocks, block_size, record]`; see `workers.kv.eight_bits`.
    """

    kv_groups: KvCacheGroups
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    stored: torch.dtype | None = None
    """The 8-bit type of what is stored; `None`: the numbers have the model's type."""

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer of the model, `[blocks, block_size, heads, dim]` each, as they are stored."""
        index = self.kv_groups.placements[layer].block_layer
        if self.stored is None:
            return self.keys[index], self.values[index]
        shape = self.kv_groups.block_layers[index]
        return numbers_in(self.keys[index], shape, self.stored), numbers_in(self.values[index], shape, self.stored)

    def scales_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a layer's keys and values in 8 bits, float32 `[blocks, block_size, heads]` each."""
        index = self.kv_groups.placements[layer].block_layer
        shape = self.kv_groups.block_layers[index]
        return scales_in(self.keys[index], shape), scales_in(self.values[index], shape)

    def read(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of `blocks` `[n]`, `[n, block_size, heads, dim]` each; of `dtype` if stored in 8 bits."""
        keys, values = self.of(layer)
        if self.stored is None:
            return keys.index_select(0, blocks), values.index_select(0, blocks)
        read = []
        for numbers, scales in zip((keys, values), self.scales_of(layer), strict=True):
            chosen = numbers.view(torch.int8).index_select(0, blocks).view(self.stored)
            read.append(dequantize(chosen, scales.index_select(0, blocks), dtype))
        return read[0], read[1]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys`, `values` `[tokens, heads, dim]` at `slots` `[tokens]` of the layer's table.

        NaN and infinities are replaced by finite numbers: the next sequence that gets the block may read it, masked.
        """
        if self.stored is None:
            for store, fresh in zip(self.of(layer), (keys, values), strict=True):
                store.view(-1, *store.shape[2:]).index_copy_(0, slots, fresh.nan_to_num())
            return
        for store, scales, fresh in zip(self.of(layer), self.scales_of(layer), (keys, values), strict=True):
            numbers, factors = quantize(fresh, self.stored)
            store.view(torch.int8).flatten(0, 1).index_copy_(0, slots, numbers.view(torch.int8))
            scales.flatten(0, 1).index_copy_(0, slots, factors)
