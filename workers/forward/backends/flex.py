"""Attention directly over the pool's blocks with FlexAttention (Dong et al. 2024), guided by the block tables.

Nothing is gathered first. The kernel visits the blocks of a row's table, and a mask function decides for each pair of
query and slot whether the query sees it. Its shapes are compiled, so it serves CUDA graphs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from workers.forward.backends.base import (
    AttentionBackend,
    AttentionSetting,
    Capabilities,
    Feature,
    StepKind,
    register_backend,
)
from workers.forward.padded_step import PaddedStep, RowPadding, VisibilityMask, WindowBlocks
from workers.kv.groups import AttentionWindow

Flex = Callable[..., torch.Tensor]
"""`flex_attention`, plain or compiled."""

_LEAST = 16  # smallest side of a tensor core product
_QUERY_TILE = 128
_MOST_KEYS = 64
_MOST_SHAPES = 512

CAPABILITIES = Capabilities(
    steps=frozenset({StepKind.PADDED}),
    features=frozenset({Feature.WINDOWS, Feature.SINKS, Feature.TREES}),
    head_sizes=range(_LEAST, 1 << 16),
    block_sizes=frozenset(1 << exponent for exponent in range(4, 17)),
    most_table_blocks=1 << 18,  # each row of a CUDA graph has a map of all blocks of the pool, for each table
    skips_unused_blocks=True,
)


@dataclass(slots=True, eq=False)
class BlockView:
    """The blocks and positions of one block table that the rows of a CUDA graph see."""

    sees: VisibilityMask
    blocks: torch.Tensor  # [rows, the pool's blocks] int32: the blocks to visit, in order, then padding
    counts: torch.Tensor  # [rows] int32: number of blocks to visit
    starts: torch.Tensor
    """`[rows, the pool's blocks]`: first position of a block in the row; -1 if the row does not hold it."""
    queries: int
    block_size: int
    _masks: dict[int, BlockMask] = field(default_factory=dict)

    def mask(self, folded: int) -> BlockMask:
        """The mask of rows of `folded` queries: those of all heads that share a KV head."""
        if folded not in self._masks:
            tile = max(_QUERY_TILE, 1 << (folded - 1).bit_length())
            self._masks[folded] = BlockMask.from_kv_blocks(
                self.counts[:, None, None],
                self.blocks[:, None, None],
                BLOCK_SIZE=(tile, self.block_size),
                mask_mod=self.is_seen,
                seq_lengths=(folded, self.starts.shape[1] * self.block_size),
                compute_q_blocks=False,
            )
        return self._masks[folded]

    def is_seen(
        self,
        row: torch.Tensor,
        head: torch.Tensor,  # noqa: ARG002 - all heads see the same positions
        query: torch.Tensor,
        slot: torch.Tensor,
    ) -> torch.Tensor:
        """Whether a query sees the position that is stored at a slot of the pool, element by element."""
        start = self.starts[row, slot // self.block_size]
        return (start >= 0) & self.sees(row, query % self.queries, start + slot % self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class FlexStep:
    """The metadata of a step of fixed sizes."""

    slots: torch.Tensor  # [tables, tokens] slot mapping
    padding: RowPadding
    views: dict[tuple[int, AttentionWindow], BlockView]
    """By block table and window."""


@register_backend("flex", CAPABILITIES, preference=10)
class FlexBackend(AttentionBackend[FlexStep]):
    """FlexAttention over the pool of one model."""

    def __init__(self, setting: AttentionSetting, flex: Flex | None = None) -> None:
        """`flex` defaults to the compiled kernel."""
        self._store = setting.store
        self._flex = flex or compiled_flex_attention()

    def plan_padded(self, step: PaddedStep) -> FlexStep:
        """A view of each block table through each window."""
        views = {
            (table, window): _view(step, read, blocks)
            for window, read in step.windows.items()
            for table, blocks in read.blocks.items()
        }
        return FlexStep(step.slots, step.padding, views)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: FlexStep) -> None:
        """Store keys and values at the step's slots."""
        self._store.write(layer, metadata.slots[self._store.kv_groups.placements[layer].table], keys, values)

    def attend(self, layer: int, queries: torch.Tensor, metadata: FlexStep, scaling: float | None) -> torch.Tensor:
        """Attend to the blocks that each row visits."""
        placement = self._store.kv_groups.placements[layer]
        view = metadata.views[placement.table, placement.window]
        keys, values = (stored.flatten(0, 1).transpose(0, 1)[None] for stored in self._store.of(layer))
        folded = metadata.padding.fold(queries, keys.shape[1])
        # The kernel's default tile of keys may not divide a small block.
        options = {"BLOCK_N": min(view.block_size, _MOST_KEYS)}
        mask = view.mask(folded.shape[2])
        return metadata.padding.unfold(
            self._flex(folded, keys, values, block_mask=mask, scale=scaling, kernel_options=options)
        )


def _view(step: PaddedStep, read: WindowBlocks, blocks: torch.Tensor) -> BlockView:
    starts = torch.full((len(blocks), step.scratch + 1), -1, dtype=torch.int32, device=blocks.device)
    own = torch.arange(blocks.shape[1], device=blocks.device) < read.counts[:, None]
    first = torch.where(own, read.order * step.block_size, -1).to(torch.int32)
    # The scratch block replaces all blocks that a row does not use; it is the first block of padding rows.
    starts.scatter_reduce_(1, blocks, first, "amax")
    visits = torch.zeros_like(starts)  # the kernel expects as many columns as the pool has blocks
    visits[:, : blocks.shape[1]] = blocks
    counts = read.counts.to(torch.int32)
    return BlockView(read.sees, visits, counts, starts, step.padding.gather.shape[1], step.block_size)


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
