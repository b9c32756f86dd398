"""One attention function for every model family: paged, ragged, with tree masks and windows.

`transformers` calls attention through a registry. The function registered here ignores its mask argument.
It reads a `StepLayout` instead, which states where each new token's key and value are stored and which stored ones the
token sees. Prompt chunks, single tokens, chains and trees are rows of one layout.

Rows of similar width and length share one padded call of scaled-dot-product attention; no layer loops over sequences.
The queries of the heads that share a KV head are folded into the query axis, so keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from cluster.core.errors import ModelLoadError
from workers.forward.layout import RowGroup, StepLayout
from workers.forward.native.attention import Kernel, NativeStep
from workers.forward.operators import define
from workers.kv.groups import LayerPlacement
from workers.kv.pool import KvPool

ATTENTION_NAME = "pilotfish_paged"
READS_SOURCE = "reads_source"
"""Attribute that marks the cross-attention modules of an encoder-decoder model."""

RelativeBias = Callable[[torch.Tensor], torch.Tensor]
"""(relative positions `[rows, queries, keys]`) → biases `[rows, heads, queries, keys]`."""

Probed = tuple[int, int, int | None, int]
"""One layer's KV heads, head dimension, window, and query heads per KV head."""


class PagedAttention:
    """Shared by a model's attention modules. The runner sets `layout` for each forward pass."""

    def __init__(self) -> None:
        self.pool: KvPool | None = None
        self.layout: StepLayout | NativeStep | None = None
        self.source_layout: StepLayout | NativeStep | None = None
        """Where the rows' sources are stored, for the cross-attention of an encoder-decoder model."""
        self.relative_bias: RelativeBias | None = None
        """Added to the products of queries and keys, if the model has such biases."""
        self.kernel: Kernel | None = None
        """The CPU kernel, if one supports this model. Layouts are then `NativeStep`s."""
        self.probe: dict[int, Probed] | None = None
        """While set, no attention is computed. Each layer records its shape here."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, dim]
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Returns `[1, tokens, heads, dim]`. `window` is only recorded by the probe; the pool's groups apply it."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        reads_source = READS_SOURCE in vars(module)
        if self.probe is not None:
            self._record(layer, (key.shape[1], key.shape[3], window, query.shape[1] // key.shape[1]), reads_source)
            return torch.zeros_like(query).transpose(1, 2)
        layout = self.source_layout if reads_source else self.layout
        if self.pool is None or layout is None:
            raise RuntimeError("a paged model was called outside its runner")
        placement = self.pool.kv_groups.placements[layer]
        keys, values = self.pool.keys[placement.block_layer], self.pool.values[placement.block_layer]
        if self.kernel is not None and isinstance(layout, NativeStep):
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            return self.kernel.attend(layout, placement, query, key, value, (keys, values), scale)
        if not isinstance(layout, StepLayout):
            raise TypeError("the step is laid out for the CPU kernel, which is not loaded")
        bias = None
        if not reads_source:
            bias = self.relative_bias
            self.pool.write(layer, layout.slots[placement.table], key[0].transpose(0, 1), value[0].transpose(0, 1))
        queries = query[0].transpose(0, 1)  # [tokens, heads, dim]
        if len(layout.groups) == 1:  # the group's tokens are the step's, in order
            group = layout.groups[0]
            attended = attend_group(group, placement, queries, keys, values, scaling, bias).flatten(0, 1)
            return (attended if group.is_whole else attended[group.scatter])[None]
        output = torch.empty_like(queries)
        for group in layout.groups:
            attended = attend_group(group, placement, queries, keys, values, scaling, bias)
            output[group.targets] = attended.flatten(0, 1)[group.scatter]
        return output.unsqueeze(0)

    def _record(self, layer: int, shape: Probed, reads_source: bool) -> None:
        """Record the shape of a layer's self-attention, which its cross-attention must have too."""
        if self.probe is None:
            return
        if reads_source and self.probe.get(layer) != shape:
            raise ModelLoadError(
                f"decoder layer {layer}: its cross-attention has the shape {shape}, which is refused; it must be that "
                f"of its self-attention, {self.probe.get(layer)}"
            )
        self.probe[layer] = shape


def attend_group(
    group: RowGroup,
    placement: LayerPlacement,
    queries: torch.Tensor,  # [tokens, heads, dim]
    keys: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    values: torch.Tensor,
    scaling: float | None,
    bias: RelativeBias | None = None,
) -> torch.Tensor:
    """Returns `[rows, queries, heads, dim]`."""
    rows, width = group.gather.shape
    heads, dim = queries.shape[1:]
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    folded = (
        (queries if group.is_whole else queries[group.gather.flatten()])
        .reshape(rows, width, kv_heads, shared, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows, kv_heads, shared * width, dim)
    )
    view = group.views.get((placement.table, placement.window))
    if view is not None:
        attended = view.attend(folded, keys, values, scaling)
    else:
        flat_blocks = group.blocks[placement.table, placement.window].flatten()
        stored_keys, stored_values = (
            store.index_select(0, flat_blocks).view(rows, -1, kv_heads, dim).transpose(1, 2) for store in (keys, values)
        )  # [rows, kv_heads, keys, dim]
        mask = group.folded_mask(shared, placement.window, queries.dtype)
        if bias is not None:
            mask = _biased_mask(group, mask, bias)
        attended = scaled_dot_product_attention(folded, stored_keys, stored_values, attn_mask=mask, scale=scaling)
    return attended.view(rows, kv_heads, shared, width, dim).permute(0, 3, 1, 2, 4).reshape(rows, width, heads, dim)


def _biased_mask(group: RowGroup, mask: torch.Tensor, bias: RelativeBias) -> torch.Tensor:
    """The additive mask with the biases of relative positions, `[rows, heads, queries, keys]`."""
    if group.bias is None:
        if group.relative is None:
            raise TypeError("the step is laid out without relative positions")
        group.bias = mask + bias(group.relative).to(mask.dtype)
    return group.bias


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the layout replaces it
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - never at inference
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function with the signature that `transformers` expects."""
    if softcap is not None or s_aux is not None:
        # The probe pass raises this when the model is loaded.
        raise ModelLoadError("a model whose attention has soft-capped logits or learned sinks is not supported")
    if torch.compiler.is_compiling():
        handle = module.attention_handle
        return torch.ops.pilotfish.attend(query, key, value, handle, scaling, sliding_window), None
    paged = module.paged_attention
    if not isinstance(paged, PagedAttention):
        raise TypeError("the attention module was not bound by bind()")
    return paged.attend(module, query, key, value, scaling, sliding_window), None


# The compiler sees attention as one opaque operator, since its arguments do not include the pool and the layout.
# A handle in a tensor identifies the module, so that one compiled layer serves all layers.
_bound: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_handles = count()


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    module = _bound[int(handle)]
    output: torch.Tensor = module.paged_attention.attend(module, query, key, value, scaling, window)  # type: ignore[operator, union-attr]
    return output


def _attend_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], query.shape[3]))


define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor handle, float? scaling, int? window) -> Tensor",
    _attend,
    _attend_shape,
)


def register() -> None:
    """Register the function with `transformers` as `ATTENTION_NAME`."""
    from transformers import AttentionInterface  # only a process that loads modules needs it

    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def bind(module: nn.Module) -> PagedAttention:
    """Give all attention modules (those with a `layer_idx`) one shared `PagedAttention`."""
    paged = PagedAttention()
    for part in module.modules():
        if hasattr(part, "layer_idx"):
            part.paged_attention = paged  # type: ignore[assignment]
            handle = next(_handles)
            _bound[handle] = part
            part.register_buffer("attention_handle", torch.tensor(handle), persistent=False)
    return paged
