"""Scaled-dot-product attention of PyTorch over gathered blocks: the reference, on every device and for every model.

Rows of similar width and length share one padded call; no layer loops over sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.forward.backends.base import (
    REFERENCE,
    AttentionBackend,
    AttentionSetting,
    Capabilities,
    Feature,
    StepKind,
    register_backend,
)
from workers.forward.gathered_step import GatheredStep, RelativeBias, RowGroup, gather_rows, gather_sources
from workers.forward.layout import RowShape
from workers.forward.padded_step import PaddedStep
from workers.kv.eight_bits import STORED_TYPES

CAPABILITIES = Capabilities(
    steps=frozenset(StepKind),
    features=frozenset(Feature),
    stored_types=frozenset(STORED_TYPES.values()),
)


@register_backend(REFERENCE, CAPABILITIES, preference=0)
class SdpaBackend(AttentionBackend[GatheredStep]):
    """Gathers the blocks of each row, and attends with an additive mask."""

    def __init__(self, setting: AttentionSetting) -> None:
        self._store = setting.store
        self._device = setting.device
        self._layers = setting.layers
        slopes = {shape.alibi_slopes for shape in setting.layers if shape.alibi_slopes is not None}
        linear = {one: _LinearBias(one, setting.device) for one in slopes}
        own: Sequence[RelativeBias | None] = setting.relative_biases or [None] * len(setting.layers)
        self._biases = [
            linear.get(shape.alibi_slopes or (), bias) for shape, bias in zip(setting.layers, own, strict=True)
        ]
        self._is_relative = any(bias is not None for bias in self._biases)

    def plan(self, rows: Sequence[RowShape]) -> GatheredStep:
        """One group of padded rows for each width and length."""
        return gather_rows(rows, self._store.kv_groups, self._device, relative=self._is_relative)

    def plan_sources(self, rows: Sequence[RowShape]) -> GatheredStep:
        """One group of padded rows for each width and length of the source."""
        return gather_sources(rows, self._store.kv_groups, self._device)

    def plan_padded(self, step: PaddedStep) -> GatheredStep:
        """All rows as one group."""
        group = RowGroup(step.padding, step.padding.scatter, {}, {})
        for window, read in step.windows.items():
            group.blocks.update({(table, window): blocks for table, blocks in read.blocks.items()})
            offset = torch.arange(step.block_size, device=read.order.device)
            keys = (read.order[:, :, None] * step.block_size + offset).flatten(1)
            group.masks[window] = read.sees.all(keys)
            if self._is_relative:
                group.relative[window] = read.sees.relative(keys)
        return GatheredStep(step.slots, [group])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: GatheredStep) -> None:
        """Store keys and values at the step's slots."""
        self._store.write(layer, metadata.slots[self._store.kv_groups.placements[layer].table], keys, values)

    def attend(self, layer: int, queries: torch.Tensor, metadata: GatheredStep, scaling: float | None) -> torch.Tensor:
        """Attend group by group."""
        return self._attend(layer, queries, metadata, scaling, None)

    def attend_with_sinks(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: GatheredStep,
        scaling: float | None,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Attend group by group, with a learned logit of each head in the softmax."""
        return self._attend(layer, queries, metadata, scaling, sinks)

    def _attend(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: GatheredStep,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if len(metadata.groups) == 1:  # the group's tokens are the step's, in order
            return self._attend_group(layer, queries, metadata.groups[0], scaling, sinks)
        output = queries.new_empty((*queries.shape[:2], self._layers[layer].value_dim))
        for group in metadata.groups:
            output[group.targets] = self._attend_group(layer, queries, group, scaling, sinks)
        return output

    def _attend_group(
        self, layer: int, queries: torch.Tensor, group: RowGroup, scaling: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:  # [the group's tokens, heads, dim]
        placement = self._store.kv_groups.placements[layer]
        rows = len(group.padding.gather)
        flat_blocks = group.blocks[placement.table, placement.window].flatten()
        keys, values = (
            stored.view(rows, -1, *stored.shape[2:]).transpose(1, 2)
            for stored in self._store.read(layer, flat_blocks, queries.dtype)
        )  # [rows, kv_heads, keys, dim]
        folded = group.padding.fold(queries, keys.shape[1])
        shared = queries.shape[1] // keys.shape[1]
        mask = self._mask(group, layer, shared, queries.dtype)
        cap = self._layers[layer].soft_cap
        if cap is None and sinks is None:
            attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        else:
            products = (folded @ keys.transpose(2, 3)).float() * (
                queries.shape[2] ** -0.5 if scaling is None else scaling
            )
            if cap is not None:
                products = cap * torch.tanh(products / cap)
            weights = _softmax(products + mask, None if sinks is None else sinks.view(keys.shape[1], shared))
            attended = weights.to(values.dtype) @ values
        return group.padding.unfold(attended)

    def _mask(self, group: RowGroup, layer: int, shared: int, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask, `[rows, 1 or kv_heads, heads_per_kv * queries, keys]`."""
        window, bias = self._store.kv_groups.placements[layer].window, self._biases[layer]
        mask = group.folded_mask(shared, window, dtype)
        if bias is None or window not in group.relative:  # cross-attention has no relative positions, and no biases
            return mask
        if (window, bias) not in group.biases:
            by_head = bias(group.relative[window]).to(dtype)  # [rows, heads, queries, keys]
            group.biases[window, bias] = mask + by_head.reshape(len(mask), -1, *mask.shape[2:])
        return group.biases[window, bias]


class _LinearBias:
    """The biases of ALiBi."""

    def __init__(self, slopes: Sequence[float], device: torch.device) -> None:
        self._slopes = torch.tensor(slopes, device=device)[:, None, None]

    def __call__(self, relative: torch.Tensor) -> torch.Tensor:
        return self._slopes * relative[:, None]


def _softmax(products: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The weights of `products` `[rows, kv_heads, heads * queries, keys]`; `sinks` `[kv_heads, heads]`."""
    if sinks is None:
        return products.softmax(-1)
    rows, kv_heads, folded, _ = products.shape
    column = sinks.float().repeat_interleave(folded // sinks.shape[1], 1)[None, :, :, None]
    return torch.cat((products, column.expand(rows, kv_heads, folded, 1)), -1).softmax(-1)[..., :-1]
