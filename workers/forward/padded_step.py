"""A step of fixed sizes on the device: what an attention backend plans a CUDA graph from.

Rows and tokens that are padding read and write a scratch block, which no sequence holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.ids import BlockId
from workers.forward.graph_sizes import WORD
from workers.kv.groups import AttentionWindow


@dataclass(frozen=True, slots=True, eq=False)
class RowPadding:
    """Pads rows of tokens to one width, and takes the padding away again."""

    gather: torch.Tensor  # [rows, queries] index into the tokens; padding repeats the row's last token
    scatter: torch.Tensor  # [tokens] flat index into [rows * queries]
    is_whole: bool
    """The rows are all rows of the step, in order and without padding: nothing is gathered or scattered."""

    def fold(self, queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """`[tokens, heads, dim]` → `[rows, kv_heads, heads_per_kv * queries, dim]`.

        The queries of the heads that share a KV head are one axis, so that keys and values are never repeated.
        """
        rows, width = self.gather.shape
        heads, dim = queries.shape[1:]
        shared = heads // kv_heads
        padded = queries if self.is_whole else queries[self.gather.flatten()]
        by_head = padded.reshape(rows, width, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
        return by_head.reshape(rows, kv_heads, shared * width, dim)

    def unfold(self, folded: torch.Tensor) -> torch.Tensor:
        """`[rows, kv_heads, heads_per_kv * queries, dim]` → `[tokens, heads, dim]`."""
        rows, width = self.gather.shape
        kv_heads, dim = folded.shape[1], folded.shape[3]
        by_token = folded.view(rows, kv_heads, -1, width, dim).permute(0, 3, 1, 2, 4)
        flat = by_token.reshape(rows * width, -1, dim)
        return flat if self.is_whole else flat[self.scatter]


@dataclass(frozen=True, slots=True, eq=False)
class VisibilityMask:
    """Which keys a query sees: stored keys by position, keys of this step by the query's word of bits."""

    window: AttentionWindow
    stored: torch.Tensor  # [rows]
    position: torch.Tensor  # [rows, queries]
    seen: torch.Tensor  # [rows, queries]

    def __call__(self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether `query` of `row` sees the position `key`, element by element."""
        return self._sees(key, self.stored[row], self.position[row, query], self.seen[row, query])

    def all(self, keys: torch.Tensor) -> torch.Tensor:
        """`keys` `[rows, keys]` → `[rows, queries, keys]`."""
        return self._sees(keys[:, None], self.stored[:, None, None], self.position[:, :, None], self.seen[:, :, None])

    def relative(self, keys: torch.Tensor) -> torch.Tensor:
        """Position of each key minus that of each query, `[rows, queries, keys]`; `keys` `[rows, keys]`."""
        token = keys - self.stored[:, None]  # index of the key's token among the row's tokens in this step
        width = self.position.shape[1]
        own = self.position.gather(1, token.clamp(0, width - 1))  # of tree nodes: by depth
        position = torch.where((token >= 0) & (token < width), own, keys)
        return position[:, None] - self.position[:, :, None]

    def _sees(
        self, key: torch.Tensor, stored: torch.Tensor, position: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        bit = key - stored  # index of the key's token among the row's tokens in this step
        visible = bit < 0
        if self.window.size is not None:
            visible = visible & ((position - key < self.window.size) | (key < self.window.sinks))
        own = (seen >> bit.clamp(0, WORD - 1)) & 1
        return visible | ((own != 0) & (bit >= 0) & (bit < WORD))


@dataclass(frozen=True, slots=True, eq=False)
class WindowBlocks:
    """The blocks that the rows read through one window."""

    blocks: dict[int, torch.Tensor]
    """By block table: the blocks to read, in order, then the scratch block; int64 `[rows, blocks]`."""
    order: torch.Tensor  # [rows, blocks] index in the row of each block
    counts: torch.Tensor  # [rows] number of blocks to read
    sees: VisibilityMask


@dataclass(frozen=True, slots=True, eq=False)
class PaddedStep:
    """The rows of a step of fixed sizes."""

    slots: torch.Tensor  # [tables, tokens] slot mapping: where each token's key and value are stored
    padding: RowPadding
    windows: dict[AttentionWindow, WindowBlocks]
    block_size: int
    scratch: BlockId
    """The block after the pool's last."""
