"""The tensors that hold the keys and values of all sequences, and where each layer's are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kv.groups import KvCacheGroups


@dataclass(frozen=True, slots=True, eq=False)
class KvStore:
    """The blocks' content. `keys[block_layer]` and `values[block_layer]` are `[blocks, block_size, heads, dim]`."""

    kv_groups: KvCacheGroups
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer of the model, `[blocks, block_size, heads, dim]` each."""
        index = self.kv_groups.placements[layer].block_layer
        return self.keys[index], self.values[index]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys`, `values` `[tokens, heads, dim]` at `slots` `[tokens]` of the layer's table.

        NaN and infinities are replaced by finite numbers: the next sequence that gets the block may read it, masked.
        """
        for store, fresh in zip(self.of(layer), (keys, values), strict=True):
            store.view(-1, *store.shape[2:]).index_copy_(0, slots, fresh.nan_to_num())
