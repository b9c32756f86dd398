"""The inputs of a CUDA graph of packed rows: the host writes each step over the one before it."""

from __future__ import annotations

import random

import pytest
import torch

from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.packed_reference import PackedReference
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.triton import TritonStep
from workers.forward.cuda_graphs import PackedBuffers
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape, StepRows
from workers.forward.triton.tiles import NO_QUERY
from workers.kv.block_table import OUT_OF_WINDOW, blocks_of
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

CPU = torch.device("cpu")
BLOCK, BLOCKS, WINDOW, SINKS = 16, 999, 20, 3
TREE = TokenTree(tuple(range(6)), (-1, 0, 0, 1, 1, -1))
SIZES = {"decoding": GraphSize(8, 64, 64, 20, 64), "prompts": GraphSize(8, 192, 192, 20, 32)}


def backend() -> PackedReference:
    """Two block tables, one of which has a window with sinks."""
    placements = (LayerPlacement(0, 0, AttentionWindow()), LayerPlacement(1, 0, AttentionWindow(WINDOW, SINKS)))
    layout = KvLayout(BLOCK, (KvGroup(), KvGroup(window=WINDOW, sinks=SINKS)))
    groups = KvCacheGroups(layout, placements, (LayerShape(2, 32, heads_per_kv=2),))
    setting = AttentionSetting(KvStore(groups, [], []), groups.block_layers * 2, BLOCKS, torch.float32, CPU)
    return PackedReference(setting)


def random_rows(draw: random.Random, size: GraphSize) -> StepRows:
    """Tokens, chains and trees, and beside them a chunk of a prompt where the size has room for one."""
    rows = []
    if size.has_wide_rows and draw.random() < 0.7:
        rows.append(random_row(draw, draw.randrange(70, 120), EMPTY_TREE))
    count = draw.randrange(0 if rows else 1, 5)
    rows += [random_row(draw, 1, draw.choice((EMPTY_TREE, TokenTree.chain(range(3)), TREE))) for _ in range(count)]
    draw.shuffle(rows)
    return StepRows(rows)


def random_row(draw: random.Random, fresh: int, tree: TokenTree) -> RowShape:
    stored = draw.randrange(150)
    count = -(-(stored + fresh + len(tree)) // BLOCK)
    whole, windowed = ([BlockId(draw.randrange(BLOCKS)) for _ in range(count)] for _ in range(2))
    for index in range(-(-SINKS // BLOCK), max(0, stored - WINDOW + 1) // BLOCK):
        windowed[index] = OUT_OF_WINDOW
    return RowShape([blocks_of(whole), blocks_of(windowed)], stored, fresh, tree)


def fill(buffers: PackedBuffers, rows: StepRows) -> None:
    positions = rows.columns.positions
    buffers.fill(rows, [7 * int(position) for position in positions], positions, range(len(rows)))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_nothing_of_a_step_is_left_in_the_next_one(size: GraphSize) -> None:
    draw, held, widths = random.Random(11), PackedBuffers(size, backend(), CPU), set()
    for _ in range(40):
        rows = random_rows(draw, size)
        alone = PackedBuffers(size, backend(), CPU)
        for buffers in (held, alone):
            fill(buffers, rows)
        assert torch.equal(held._numbers, alone._numbers)
        widths.add(int(rows.columns.widths.sum()))
    assert len(widths) > 10, "steps of many sizes followed each other"


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_inputs_begin_with_the_step_and_the_rest_is_padding(size: GraphSize) -> None:
    draw, ours = random.Random(12), backend()
    buffers = PackedBuffers(size, ours, CPU)
    for _ in range(20):
        rows = random_rows(draw, size)
        fill(buffers, rows)
        tokens, positions = len(rows.columns.positions), rows.columns.positions.tolist()
        assert buffers.positions[0].tolist() == positions + [0] * (size.tokens - tokens)
        assert buffers.tokens[0, :tokens].tolist() == [7 * position for position in positions]
        assert buffers.selected[: len(rows)].tolist() == list(range(len(rows)))
        step, alone = buffers.metadata(), ours.plan(rows)
        assert torch.equal(step.slots[:, :tokens], alone.slots)
        assert (step.slots[:, tokens:] == BLOCKS * BLOCK).all(), "padding is stored in the scratch block"
        check_parts(step, alone, len(rows))


def check_parts(step: TritonStep, alone: TritonStep, rows: int) -> None:
    """What the graph reads of the rows is what the same step outside of graphs reads; padding has no query."""
    for window, parts in step.queries.items():
        expected = {part.is_wide: part for part in alone.queries[window] if len(part.items)}
        for part in parts:
            tiles = queries = 0
            if (same := expected.get(part.is_wide)) is not None:
                tiles, queries = len(same.items), len(same.tokens)
                assert torch.equal(part.items[:tiles], same.items)
                for ours, other in ((part.tokens, same.tokens), (part.last, same.last), (part.words, same.words)):
                    assert torch.equal(ours[:queries], other)
                assert torch.equal(part.starts[:rows], same.starts)
            assert not part.items[tiles:].any() and not part.arrivals.any()
            assert (part.last[queries:] == NO_QUERY).all()
    for key, blocks in step.blocks.items():
        same_blocks = alone.blocks[key]
        assert torch.equal(blocks.counts[:rows], same_blocks.counts) and not blocks.counts[rows:].any()
        assert torch.equal(blocks.blocks[:rows, : same_blocks.blocks.shape[1]], same_blocks.blocks)
