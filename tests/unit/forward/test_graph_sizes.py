"""The list of CUDA graphs, and the graph that a step runs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.ids import BlockId
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.graph_sizes import (
    FEW_ROWS,
    LONGEST,
    LONGEST_OF_FEW,
    MOST_RANKED,
    MOST_TOKENS,
    GraphSize,
    describe_block_graphs,
    describe_graphs,
    describe_head_graphs,
    describe_parallel_graphs,
    drafting_graph_sizes,
    gathered_graph_sizes,
    packed_graph_sizes,
    padded_graph_sizes,
    smallest_drafting_graph,
    smallest_graph,
    widths_up_to,
)
from workers.forward.layout import RowShape
from workers.kv.groups import AttentionWindow

BLOCK, BLOCKS = 16, 100
PACKED = packed_graph_sizes(BLOCKS)


def shape(stored_len: int = 0, fresh: int = 1, nodes: int = 0) -> RowShape:
    end = stored_len + fresh + nodes
    tree = TokenTree.chain(range(nodes)) if nodes else EMPTY_TREE
    return RowShape([[BlockId(block) for block in range(-(-end // BLOCK))]], stored_len, fresh, tree)


@pytest.mark.parametrize(("rows", "selected", "found"), [
    ([shape(70)], 1, (1, 1)),
    ([shape(70), shape(3), shape(9)], 3, (4, 4)),
    ([shape(10, nodes=4)] * 3, 15, (4, 16)),
    ([shape(10, nodes=7)] * 64, 512, (64, 512)),
    ([shape(10, nodes=15), *[shape(9)] * 63], 79, (64, 128)),  # rows are not padded to one width
    ([shape(fresh=64), shape(30)], 2, (8, 128)),
    ([shape(fresh=300)], 1, (8, 320)),
    ([shape(40)] * 32 + [shape(fresh=256)], 33, (64, 320)),
    ([shape(40, nodes=3)] * 32 + [shape(fresh=256)], 129, (64, 384)),
])  # fmt: skip
def test_a_step_runs_in_a_graph_that_is_a_little_larger(
    rows: list[RowShape], selected: int, found: tuple[int, int]
) -> None:
    size = smallest_graph(PACKED, rows, selected, BLOCK)
    assert size is not None
    assert (size.rows, size.tokens) == found


@pytest.mark.parametrize("rows", [
    [shape(fresh=MOST_TOKENS + 1)],
    [shape()] * 129,
    [shape(BLOCK * BLOCKS)],
    [shape(fresh=100, nodes=1)],
    [shape(40, nodes=5)] * 64 + [shape(fresh=100)],
], ids=["tokens", "rows", "length", "a draft behind a prompt", "many drafts beside a prompt"])  # fmt: skip
def test_a_larger_step_has_no_graph(rows: list[RowShape]) -> None:
    assert smallest_graph(PACKED, rows, 1, BLOCK) is None


def test_a_backend_that_pads_rows_has_graphs_of_one_width() -> None:
    sizes = padded_graph_sizes(BLOCKS)
    assert smallest_graph(sizes, [shape(9)] * 63 + [shape(10, nodes=15)], 79, BLOCK) is None
    found = smallest_graph(sizes, [shape(9), shape(10, nodes=15)], 17, BLOCK)
    assert found is not None
    assert (found.rows, found.queries, found.tokens) == (2, 16, 32)
    assert smallest_graph(sizes, [shape(fresh=100)], 1, BLOCK) is None


@pytest.mark.parametrize("sizes", [packed_graph_sizes, padded_graph_sizes])
def test_few_long_rows_have_graphs_of_their_own_and_short_rows_never_pad_to_them(sizes: Callable[..., Any]) -> None:
    listed = sizes(BLOCKS, 4 * BLOCKS)
    assert [size for size in listed if size.blocks == BLOCKS] == sizes(BLOCKS)
    longest = shape(4 * BLOCK * BLOCKS - 8, nodes=7)
    for rows, found in (
        ([shape(70)], (1, 1, BLOCKS)),
        ([shape(BLOCK * BLOCKS)], (1, 1, 4 * BLOCKS)),
        ([longest] * FEW_ROWS, (8, 64, 4 * BLOCKS)),
        ([longest, *[shape(70)] * 7], (8, 16 if sizes is packed_graph_sizes else 64, 4 * BLOCKS)),
    ):
        size = smallest_graph(listed, rows, len(rows), BLOCK)
        assert size is not None
        assert (size.rows, size.tokens, size.blocks) == found
    assert smallest_graph(listed, [longest] * (FEW_ROWS + 1), 8, BLOCK) is None
    assert smallest_graph(listed, [shape(BLOCK * BLOCKS, fresh=100)], 1, BLOCK) is None


def test_graphs_of_long_rows_need_no_more_memory_for_the_sums_of_splits() -> None:
    most = max(size.tokens for size in packed_graph_sizes(LONGEST, LONGEST_OF_FEW) if size.blocks > LONGEST)
    assert most * LONGEST_OF_FEW <= MOST_TOKENS * LONGEST


def test_a_backend_that_gathers_has_graphs_of_several_lengths() -> None:
    sizes = gathered_graph_sizes(BLOCK, longest=1 << 20)
    found = smallest_graph(sizes, [shape(300), shape(200)], 2, BLOCK)
    assert found == GraphSize(2, 1, 2, 32, 2)
    assert smallest_graph(sizes, [shape(3000)], 1, BLOCK) is None
    assert max(size.rows * size.blocks * BLOCK for size in sizes) <= 1 << 17


def test_sizes_ascend_and_the_list_is_told() -> None:
    for sizes in (PACKED, padded_graph_sizes(BLOCKS), gathered_graph_sizes(BLOCK, 4096)):
        assert [size.tokens for size in sizes] == sorted(size.tokens for size in sizes)
        assert len(set(sizes)) == len(sizes)
    prompts = sum(size.has_wide_rows for size in PACKED)
    told = describe_graphs()
    assert f"{len(PACKED) - prompts} by rows and tokens in all (1 row: 1, 2, 4, 8, 16; 2 rows: 2, 4, 8, 16, 32;" in told
    assert "64 rows: 64, 128, 256, 512; 128 rows: 128, 256, 512)" in told
    assert f"{prompts} with prompts, of 128, 192, 256, 320, 384, 448, {MOST_TOKENS} tokens with up to 8 and 64" in told


def test_a_window_bounds_the_blocks_that_a_row_reads() -> None:
    size = GraphSize(4, 8, 32, BLOCKS, 4)
    assert size.blocks_of(AttentionWindow(), BLOCK) == BLOCKS
    assert size.blocks_of(AttentionWindow(40, sinks=20), BLOCK) == 2 + 3 + 2


def test_the_sizes_of_drafting_graphs_are_a_pure_function_of_widths() -> None:
    sizes = drafting_graph_sizes(widths_up_to(3), 256)
    assert sizes == drafting_graph_sizes(widths_up_to(4), 256)
    assert widths_up_to(4) == [1, 2, 4]
    assert [(size.rows, size.tokens) for size in sizes if size.rows in (1, 64, 128)] == [
        (1, 1), (1, 2), (1, 4), (64, 64), (64, 128), (128, 128), (64, 256), (128, 256)
    ]  # fmt: skip
    assert all(size.tokens == 7 * size.rows <= MOST_TOKENS for size in drafting_graph_sizes((7,)))


@pytest.mark.parametrize(("rows", "tokens", "found"), [
    (1, 1, (1, 1)), (3, 5, (4, 8)), (3, 9, (4, 16)), (2, 9, (2, 16)), (5, 5, (8, 8)), (64, 256, (64, 256)),
    (129, 129, None), (64, 257, None),
])  # fmt: skip
def test_a_drafting_pass_runs_in_a_graph_that_is_a_little_larger(
    rows: int, tokens: int, found: tuple[int, int] | None
) -> None:
    size = smallest_drafting_graph(drafting_graph_sizes((1, 2, 4, 8), 256), rows, tokens)
    assert (None if size is None else (size.rows, size.tokens)) == found


def test_the_sizes_of_drafting_graphs_are_told() -> None:
    told = describe_head_graphs(4)
    assert told.startswith("37 by rows and tokens in all over committed tokens (1 row: 1, 2, 4, 8, 16; 2 rows: 2, 4, 8")
    assert "23 over the nodes that are expanded (1 row: 1, 2, 4; 2 rows: 2, 4, 8; " in told
    assert told.endswith("128 rows: 128, 256)")
    rows = "1, 2, 4, 8, 16, 32, 64, 128 rows"
    assert describe_block_graphs() == f"the blocks of {rows}, of up to {MOST_TOKENS} tokens in all"
    assert describe_parallel_graphs() == f"the candidates at all depths of {rows}, of up to {MOST_RANKED} tokens in all"
