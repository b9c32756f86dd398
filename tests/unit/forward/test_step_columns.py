"""The columns of a step say of each row and token what the rows themselves say."""

from __future__ import annotations

import random

import pytest

from cluster.core.ids import BlockId
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.layout import RowShape, StepRows, blocks_read, slots_of
from workers.kv.groups import AttentionWindow

SIZE, TABLES = 4, 2


def random_rows(draw: random.Random, *, chains: bool = False) -> list[RowShape]:
    """Chunks, single tokens, chains and trees, whose sequences have other blocks in each table."""
    rows = []
    for _ in range(draw.randrange(1, 6)):
        nodes = draw.choice((0, 3, 9))
        parents = range(-1, nodes - 1)
        if not chains:
            parents = [draw.choice((parent, draw.randrange(-1, parent + 1))) for parent in parents]
        stored, fresh = draw.randrange(40), draw.choice((1, 1, 6))
        count = -(-(stored + fresh + nodes) // SIZE)
        held = [[BlockId(draw.randrange(900)) for _ in range(count)] for _ in range(TABLES)]
        rows.append(RowShape(held, stored, fresh, TokenTree(tuple(range(nodes)), tuple(parents))))
    return rows


def test_columns_are_those_of_each_row() -> None:
    draw = random.Random(5)
    for index in range(40):
        rows = random_rows(draw, chains=index % 4 == 0)
        columns = StepRows(rows).columns
        assert columns.widths.tolist() == [row.width for row in rows]
        assert columns.base_lens.tolist() == [row.base_len for row in rows]
        assert columns.ends.tolist() == [row.end for row in rows]
        assert columns.positions.tolist() == [position for row in rows for position in row.positions()]
        assert columns.is_node.tolist() == [index >= row.fresh for row in rows for index in range(row.width)]
        assert columns.flat_slots(TABLES, SIZE).tolist() == [
            [slot for row in rows for slot in slots_of(row.blocks[table], row.stored_len, row.end, SIZE)]
            for table in range(TABLES)
        ]


@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow(9), AttentionWindow(6, sinks=5)])
def test_the_blocks_that_rows_read_are_those_of_each_row(window: AttentionWindow) -> None:
    rows = random_rows(random.Random(6))
    found = StepRows(rows).columns.blocks_read(window, SIZE)
    assert list(zip(*(one.tolist() for one in found), strict=True)) == [blocks_read(row, window, SIZE) for row in rows]


def test_a_step_without_rows_has_no_tokens() -> None:
    columns = StepRows().columns
    assert (columns.positions.tolist(), columns.flat_slots(TABLES, SIZE).tolist()) == ([], [[], []])


def test_columns_are_computed_once() -> None:
    rows = StepRows([RowShape([[BlockId(1)]], 0, 1, EMPTY_TREE)])
    assert StepRows.of(rows) is rows
    assert StepRows.of(list(rows)) == rows
    assert rows.columns is rows.columns
