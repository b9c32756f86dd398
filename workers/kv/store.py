"""The tensors that hold the keys and values of all sequences, and where each layer's are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kv.eight_bits import dequantize, numbers_in, quantize, scales_in
from workers.kv.groups import KvCacheGroups
from workers.kv.spec import LayerShape


@dataclass(frozen=True, slots=True, eq=False)
class KvStore:
    """The blocks' content. `keys[block_layer]` and `values[block_layer]` are `[blocks, block_size, heads, dim]`.

    In 8 bits they are records, uint8 `[blocks, block_size, record]`; see `workers.kv.eight_bits`. Values that are the
    first numbers of their keys (`LayerShape.latent_dim`) have no tensor of their own: theirs is empty.
    """

    kv_groups: KvCacheGroups
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    stored: torch.dtype | None = None
    """The 8-bit type of what is stored; `None`: the numbers have the model's type."""

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer of the model, `[blocks, block_size, heads, dim]` each, as they are stored."""
        index = self.kv_groups.placements[layer].block_layer
        shape = self.kv_groups.block_layers[index]
        keys, values = self.keys[index], self.values[index]
        if self.stored is not None:
            keys = numbers_in(keys, shape, self.stored)
            values = keys if shape.latent_dim is not None else numbers_in(values, shape, self.stored)
        return keys, values if shape.latent_dim is None else keys[..., : shape.latent_dim]

    def scales_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a layer's keys and values in 8 bits, float32 `[blocks, block_size, heads]` each."""
        index = self.kv_groups.placements[layer].block_layer
        shape = self.kv_groups.block_layers[index]
        keys = scales_in(self.keys[index], shape)
        return keys, keys if shape.latent_dim is not None else scales_in(self.values[index], shape)

    def read(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of `blocks` `[n]`, `[n, block_size, heads, dim]` each; of `dtype` if stored in 8 bits."""
        shape, read = self._shape(layer), []
        scales = self.scales_of(layer) if self.stored is not None else (None, None)
        for numbers, own in list(zip(self.of(layer), scales, strict=True))[: shape.records]:
            if own is None or self.stored is None:
                read.append(numbers.index_select(0, blocks))
                continue
            chosen = numbers.view(torch.int8).index_select(0, blocks).view(self.stored)
            read.append(dequantize(chosen, own.index_select(0, blocks), dtype))
        return read[0], read[1] if shape.latent_dim is None else read[0][..., : shape.latent_dim]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys`, `values` `[tokens, heads, dim]` at `slots` `[tokens]` of the layer's table.

        NaN and infinities are replaced by finite numbers: the next sequence that gets the block may read it, masked.
        `values` that are the first numbers of their keys are stored with these.
        """
        fresh = (keys, values)[: self._shape(layer).records]
        if self.stored is None:
            for store, one in zip(self.of(layer), fresh, strict=False):
                store.view(-1, *store.shape[2:]).index_copy_(0, slots, one.nan_to_num())
            return
        for store, scales, one in zip(self.of(layer), self.scales_of(layer), fresh, strict=False):
            numbers, factors = quantize(one, self.stored)
            store.view(torch.int8).flatten(0, 1).index_copy_(0, slots, numbers.view(torch.int8))
            scales.flatten(0, 1).index_copy_(0, slots, factors)

    def _shape(self, layer: int) -> LayerShape:
        return self.kv_groups.block_layers[self.kv_groups.placements[layer].block_layer]
