"""One attention function for every model family: paged, ragged, tree-masked.

`transformers` calls attention through a registry; the function registered here ignores the mask it
is given and reads a `StepLayout` instead, which says where each fresh token's key and value go and
which stored ones it may see. Prompt chunks, single tokens, chains and trees are rows of one layout.

Rows of similar width and context share one padded scaled-dot-product call; there is no loop over
sequences inside a layer. Queries of the heads that share a KV head are folded into the query axis,
so that keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cluster.core.errors import ModelLoadError
from cluster.core.tree import ROOT, TokenTree
from workers.model.pool import KvPool

ATTENTION_NAME = "pilotfish_paged"
_LONGEST_PADDED_ROW = 32  # rows at least this wide are not padded against others


@dataclass(frozen=True, slots=True)
class RowShape:
    """What attention must know of a row: its blocks, how much is stored, how much is fresh."""

    blocks: Sequence[int]
    stored_len: int
    fresh: int
    """Committed tokens in this step; they see everything up to themselves."""
    tree: TokenTree
    """Guesses below the last fresh token; each sees the committed tokens and its ancestors."""

    @property
    def width(self) -> int:
        return self.fresh + len(self.tree)

    @property
    def base_len(self) -> int:
        return self.stored_len + self.fresh

    def positions(self) -> list[int]:
        """Absolute position of each query; tree nodes of one depth share theirs."""
        committed = list(range(self.stored_len, self.base_len))
        return committed + [self.base_len + depth - 1 for depth in self.tree.depths()]


@dataclass(slots=True)
class RowGroup:
    """Rows that share one padded attention call."""

    gather: torch.Tensor  # [rows, queries] index into the step's tokens; padding repeats the first
    scatter: torch.Tensor  # [tokens] flat index into [rows * queries]
    targets: torch.Tensor  # [tokens] where those outputs belong in the step
    blocks: torch.Tensor  # [rows, blocks]
    mask: torch.Tensor  # [rows, queries, keys] true where a query sees a key
    query_position: torch.Tensor  # [rows, queries]
    key_position: torch.Tensor  # [rows, keys]
    folded: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def folded_mask(self, heads_per_kv: int, window: int | None) -> torch.Tensor:
        """The mask for queries folded over the heads of one KV head: `[rows, 1, heads * queries, keys]`."""
        key = (heads_per_kv, window)
        if key not in self.folded:
            mask = self.mask
            if window is not None:
                mask = mask & (self.query_position[:, :, None] - self.key_position[:, None, :] < window)
            self.folded[key] = mask.repeat(1, heads_per_kv, 1).unsqueeze(1)
        return self.folded[key]


@dataclass(slots=True)
class StepLayout:
    """Everything attention needs for one forward pass, the same for every layer."""

    slots: torch.Tensor  # [tokens] where each token's key and value are stored
    groups: list[RowGroup]


class PagedAttention:
    """Bound to a model's attention modules at load; `layout` is set for the time of a forward pass."""

    def __init__(self) -> None:
        self.pool: KvPool | None = None
        self.layout: StepLayout | None = None
        self.probe: dict[int, tuple[int, int]] | None = None
        """While set, no attention is computed: each layer's (KV heads, head dimension) is noted."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, dim]
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Returns `[1, tokens, heads, dim]`."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if self.probe is not None:
            self.probe[layer] = (key.shape[1], key.shape[3])
            return torch.zeros_like(query).transpose(1, 2)
        if self.pool is None or self.layout is None:
            raise RuntimeError("a paged model was called outside of its runner")
        self.pool.write(layer, self.layout.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        queries = query[0].transpose(0, 1)  # [tokens, heads, dim]
        output = torch.empty_like(queries)
        for group in self.layout.groups:
            attended = _attend_group(group, queries, self.pool.keys[layer], self.pool.values[layer], scaling, window)
            output[group.targets] = attended.flatten(0, 1)[group.scatter]
        return output.unsqueeze(0)


def _attend_group(
    group: RowGroup,
    queries: torch.Tensor,  # [tokens, heads, dim]
    keys: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Returns `[rows, queries, heads, dim]`."""
    rows, width = group.gather.shape
    heads, dim = queries.shape[1:]
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    folded = (
        queries[group.gather.flatten()]
        .view(rows, width, kv_heads, shared, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows, kv_heads, shared * width, dim)
    )
    flat_blocks = group.blocks.flatten()
    stored_keys, stored_values = (
        store.index_select(0, flat_blocks).view(rows, -1, kv_heads, dim).transpose(1, 2) for store in (keys, values)
    )  # [rows, kv_heads, keys, dim]
    attended = scaled_dot_product_attention(
        folded, stored_keys, stored_values, attn_mask=group.folded_mask(shared, window), scale=scaling
    )
    return attended.view(rows, kv_heads, shared, width, dim).permute(0, 3, 1, 2, 4).reshape(rows, width, heads, dim)


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the layout knows better
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - never at inference
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The signature that `transformers` calls."""
    if softcap is not None or s_aux is not None:
        # Seen in the probe pass, when the model is loaded.
        raise ModelLoadError("a model whose attention has soft-capped logits or learned sinks is not supported")
    paged = module.paged_attention
    if not isinstance(paged, PagedAttention):
        raise TypeError("the attention module was not bound by bind()")
    return paged.attend(module, query, key, value, scaling, sliding_window), None


def register() -> None:
    """Make the function known to `transformers` under `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def bind(module: nn.Module) -> PagedAttention:
    """Give every attention module (whatever has a `layer_idx`) one shared `PagedAttention`."""
    paged = PagedAttention()
    for part in module.modules():
        if hasattr(part, "layer_idx"):
            part.paged_attention = paged  # type: ignore[assignment]
    return paged


def lay_out(rows: Sequence[RowShape], pool: KvPool, device: torch.device) -> StepLayout:
    """Turn rows into index tensors. Tokens of the step are the rows' tokens, one row after another."""
    size = pool.block_size
    slots: list[int] = []
    first_token: list[int] = []
    for row in rows:
        first_token.append(len(slots))
        slots.extend(
            row.blocks[position // size] * size + position % size
            for position in range(row.stored_len, row.stored_len + row.width)
        )
    groups = [
        _group([rows[index] for index in members], [first_token[index] for index in members], size, device)
        for members in _similar(rows, size)
    ]
    return StepLayout(torch.tensor(slots, device=device), groups)


def _similar(rows: Sequence[RowShape], block_size: int) -> list[list[int]]:
    """Indices of rows that may be padded against each other without wasting more than half."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        if row.width >= _LONGEST_PADDED_ROW:
            buckets[(-1, index)] = [index]
            continue
        blocks = -(-(row.stored_len + row.width) // block_size)
        # Widths are padded to the next power of four: a tree and a lone token cost the same memory traffic.
        key = ((row.width - 1).bit_length() // 2, (blocks - 1).bit_length())
        buckets.setdefault(key, []).append(index)
    return list(buckets.values())


def _group(rows: list[RowShape], first_token: list[int], block_size: int, device: torch.device) -> RowGroup:
    queries = max(row.width for row in rows)
    blocks = max(-(-(row.stored_len + row.width) // block_size) for row in rows)
    keys = blocks * block_size
    gather: list[list[int]] = []
    scatter: list[int] = []
    targets: list[int] = []
    tables: list[list[int]] = []
    query_limit: list[list[int]] = []
    query_position: list[list[int]] = []
    key_position = torch.arange(keys, device=device).repeat(len(rows), 1)
    for index, (row, first) in enumerate(zip(rows, first_token, strict=True)):
        padding = queries - row.width
        gather.append([first + query for query in range(row.width)] + [first] * padding)
        scatter.extend(index * queries + query for query in range(row.width))
        targets.extend(range(first, first + row.width))
        used = list(row.blocks[: -(-(row.stored_len + row.width) // block_size)])
        tables.append(used + [0] * (blocks - len(used)))
        positions = row.positions()
        query_position.append(positions + [0] * padding)
        query_limit.append(_last_key_seen(row) + [0] * padding)
        key_position[index, row.base_len : row.base_len + len(row.tree)] = torch.tensor(
            positions[row.fresh :], device=device
        )
    mask = torch.arange(keys, device=device)[None, None, :] <= torch.tensor(query_limit, device=device)[:, :, None]
    for index, row in enumerate(rows):
        if not row.tree.is_chain:
            nodes = len(row.tree)
            ancestors = torch.tensor(row.tree.ancestor_mask(), device=device)
            mask[index, row.fresh : row.width, row.base_len : row.base_len + nodes] = ancestors
    return RowGroup(
        gather=torch.tensor(gather, device=device),
        scatter=torch.tensor(scatter, device=device),
        targets=torch.tensor(targets, device=device),
        blocks=torch.tensor(tables, device=device),
        mask=mask,
        query_position=torch.tensor(query_position, device=device),
        key_position=key_position,
    )


def _last_key_seen(row: RowShape) -> list[int]:
    """For each query the last key it sees; a branching tree's own keys are patched in afterwards."""
    limits = list(range(row.stored_len, row.base_len))
    if row.tree.is_chain:
        return limits + list(range(row.base_len, row.base_len + len(row.tree)))
    return limits + [row.base_len + ROOT] * len(row.tree)
