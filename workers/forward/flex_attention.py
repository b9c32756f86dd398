"""Attention directly over the pool's blocks with FlexAttention (Dong et al. 2024), guided by the block tables.

Nothing is gathered first. The kernel visits the blocks of a row's table, and a mask function decides for each pair of
query and slot whether the query sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from workers.kv.spec import LayerShape

Flex = Callable[..., torch.Tensor]
"""`flex_attention`, plain or compiled."""

_LEAST = 16  # smallest side of a tensor core product
_QUERY_TILE = 128
_MOST_KEYS = 64
_MOST_SHAPES = 512


@dataclass(slots=True)
class BlockView:
    """The blocks and positions of one block table that the rows of a CUDA graph see."""

    flex: Flex
    sees: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(row, query, position) → whether the query sees the position, element by element."""
    blocks: torch.Tensor  # [rows, the pool's blocks] int32: the blocks to visit, in order, then padding
    counts: torch.Tensor  # [rows] int32: number of blocks to visit
    starts: (
        torch.Tensor
    )  # [rows, the pool's blocks] first position of a block in the row; -1 if the row does not hold it
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
        """Returns the attention output, of the shape of `queries`."""
        stored_keys, stored_values = (store.flatten(0, 1).transpose(0, 1)[None] for store in (keys, values))
        mask = self._mask(queries.shape[2])
        # The kernel's default tile of keys may not divide a small block.
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
        head: torch.Tensor,  # noqa: ARG002 - all heads see the same positions
        query: torch.Tensor,
        slot: torch.Tensor,
    ) -> torch.Tensor:
        start = self.starts[row, slot // self.block_size]
        return (start >= 0) & self.sees(row, query % self.queries, start + slot % self.block_size)


def is_supported(shape: LayerShape, block_size: int) -> bool:
    """Whether the kernel supports heads and blocks of these sizes."""
    return shape.head_dim >= _LEAST and block_size >= _LEAST and block_size & (block_size - 1) == 0


@cache
def compiled_flex_attention() -> Flex:
    """`flex_attention`, compiled once per shape: the shapes of a CUDA graph are fixed."""
    # Above its limit the compiler gives up, and uncompiled FlexAttention computes over the whole pool.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, _MOST_SHAPES
    )
    compiled: Flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return compiled
