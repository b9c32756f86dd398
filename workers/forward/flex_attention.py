"""Attention straight over the pool's blocks: FlexAttention (Dong et al. 2024), told by the block tables where to look.

Nothing is gathered first: the kernel visits the blocks that a row's table names, and asks a function for each pair of
query and slot whether the one sees the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from workers.kv.spec import LayerShape

Flex = Callable[..., torch.Tensor]
"""`flex_attention`, or that compiled."""

_LEAST = 16  # the smallest side of a product on a tensor core
_QUERY_TILE = 128
_MOST_KEYS = 64
_MOST_SHAPES = 512


@dataclass(slots=True)
class BlockView:
    """What the rows of a frame see of one table."""

    flex: Flex
    sees: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(row, query, position) → whether; element by element."""
    blocks: torch.Tensor  # [rows, the pool's blocks] int32: those to visit come first, in their order
    counts: torch.Tensor  # [rows] int32: how many of them
    starts: torch.Tensor  # [rows, the pool's blocks] where a block begins in the row; -1 where it is not the row's
    queries: int
    block_size: int
    _masks: dict[int, BlockMask] = field(default_factory=dict)

    def attend(
        self,
        queries: torch.Tensor,  # [rows, kv_heads, heads_per_kv * queries, dim]
        keys: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
        values: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Of the shape of `queries`."""
        stored_keys, stored_values = (store.flatten(0, 1).transpose(0, 1)[None] for store in (keys, values))
        mask = self._mask(queries.shape[2])
        # A kernel's own choice of how many keys to take at a time may not divide a small block.
        options = {"BLOCK_N": min(self.block_size, _MOST_KEYS)}
        return self.flex(queries, stored_keys, stored_values, block_mask=mask, scale=scaling, kernel_options=options)

    def _mask(self, folded: int) -> BlockMask:
        if folded not in self._masks:
            tile = max(_QUERY_TILE, 1 << (folded - 1).bit_length())
            self._masks[folded] = BlockMask.from_kv_blocks(
                self.counts[:, None, None],
                self.blocks[:, None, None],
                BLOCK_SIZE=(tile, self.block_size),
                mask_mod=self._is_seen,
                seq_lengths=(folded, self.starts.shape[1] * self.block_size),
                compute_q_blocks=False,
            )
        return self._masks[folded]

    def _is_seen(
        self,
        row: torch.Tensor,
        head: torch.Tensor,  # noqa: ARG002 - heads see alike
        query: torch.Tensor,
        slot: torch.Tensor,
    ) -> torch.Tensor:
        start = self.starts[row, slot // self.block_size]
        return (start >= 0) & self.sees(row, query % self.queries, start + slot % self.block_size)


def is_supported(shape: LayerShape, block_size: int) -> bool:
    """Whether the kernel can work with such heads and blocks."""
    return shape.head_dim >= _LEAST and block_size >= _LEAST and block_size & (block_size - 1) == 0


@cache
def compiled_flex_attention() -> Flex:
    """One kernel for each shape: the sizes of a frame are fixed."""
    # Beyond the limit the compiler would give up, and what is not compiled computes the whole pool.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, _MOST_SHAPES
    )
    compiled: Flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return compiled
