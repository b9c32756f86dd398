"""Compares FlexAttention with the reference attention on this device before a model uses it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import distributed

from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.attention import attend_group
from workers.forward.flex_attention import Flex, compiled_flex_attention, is_supported
from workers.forward.graph_buffers import GraphBuffers, graph_size
from workers.forward.layout import RowShape
from workers.forward.loaded_model import LoadedModel
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.pool import KvPool
from workers.kv.spec import LayerShape

logger = logging.getLogger(__name__)

_MAX_MAP = 1 << 18  # each row of a CUDA graph has a map of all blocks of the pool, for each table
_BLOCKS = 12
_TREE = TokenTree((1, 2, 3, 4, 5), (-1, -1, 0, 0, 3))


def verified_flex_attention(model: LoadedModel, pool: KvPool, flex: Flex | None = None) -> Flex | None:
    """Return `flex` if it supports the model and agrees with the reference attention, `None` otherwise.

    `flex` defaults to the compiled kernel.
    """
    layout = pool.layout
    if layout.tables * pool.blocks_total > _MAX_MAP:
        logger.info("FlexAttention is not used: %d blocks are more than its map may have", pool.blocks_total)
        return None
    if not all(is_supported(shape, layout.block_size) for shape in model.layers):
        logger.info("FlexAttention is not used: it does not support these heads, or blocks of %d", layout.block_size)
        return None
    chosen = compiled_flex_attention() if flex is None else flex
    try:
        shapes = {replace(shape, window=None) for shape in model.layers}
        wrong = [shape for shape in shapes if not _agrees(chosen, shape, layout.block_size, model)]
        problem = f"its output differs from the reference for {wrong[0]}" if wrong else None
    except Exception as error:  # the compiler may raise anything
        problem = repr(error)
    if problem is None:
        logger.info("FlexAttention passed its trial on this device")
    else:
        logger.warning("FlexAttention is not used on this device: %s", problem)
    return chosen if _all_ranks(problem is None, model) else None


@torch.inference_mode()
def _agrees(flex: Flex, shape: LayerShape, size: int, model: LoadedModel) -> bool:
    """Whether `flex` agrees with the reference on a tree, a token and a prompt, with a window and without."""
    rows = [
        RowShape([[BlockId(block) for block in (7, 2, 9, 4)]], 2 * size + 3, 1, _TREE),
        RowShape([[BlockId(block) for block in (5, 11)]], size, 1, EMPTY_TREE),
        RowShape([[BlockId(3)]], 0, 5, EMPTY_TREE),
    ]
    placements = (LayerPlacement(0, 0, AttentionWindow()), LayerPlacement(0, 0, AttentionWindow(size + 4, sinks=2)))
    kv_groups = KvCacheGroups(KvLayout(size), placements, (shape,))
    tokens = sum(row.width for row in rows)
    bounds = graph_size(rows, tokens, size, fixed_blocks=8)
    if bounds is None:
        return False
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(model.device, model.dtype)

    queries = random_tensor(bounds.tokens, shape.kv_heads * shape.heads_per_kv, shape.head_dim)
    keys, values = (random_tensor(_BLOCKS + 1, size, shape.kv_heads, shape.head_dim) for _ in range(2))
    outputs: list[list[torch.Tensor]] = []
    for kernel in (None, flex):
        buffers = GraphBuffers(bounds, kv_groups, BlockId(_BLOCKS), model.device, kernel)
        buffers.fill(rows, range(tokens), [position for row in rows for position in row.positions()], range(tokens))
        group = buffers.layout().groups[0]
        attended = [
            attend_group(group, placement, queries, keys, values, None).flatten(0, 1) for placement in placements
        ]
        outputs.append([part[group.scatter[:tokens]].float() for part in attended])
    tolerance = max(8 * torch.finfo(model.dtype).eps, 1e-3)
    return all(bool((one - other).abs().max() < tolerance) for one, other in zip(*outputs, strict=True))


def _all_ranks(answer: bool, model: LoadedModel) -> bool:
    """Whether all ranks agree, since all must run the same CUDA graphs."""
    if model.tensor_parallel == 1:
        return answer
    least = torch.tensor(int(answer))
    distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
    return bool(least)
