"""The block allocator: integers only."""

from __future__ import annotations

import pytest

from cluster.core.errors import KvPoolExhausted
from workers.model.blocks import BlockAllocator, BlockTable


def test_a_table_takes_whole_blocks_and_gives_them_back() -> None:
    allocator = BlockAllocator(blocks_total=4, block_size=8)
    table = BlockTable()
    allocator.reserve(table, 17)
    assert len(table.blocks) == 3
    assert allocator.blocks_free == 1
    allocator.release(table)
    assert allocator.blocks_free == 4


def test_a_refused_reservation_changes_nothing() -> None:
    allocator = BlockAllocator(blocks_total=2, block_size=8)
    table = BlockTable()
    allocator.reserve(table, 8)
    with pytest.raises(KvPoolExhausted, match="2 KV blocks are needed for 24 tokens and 1 of 2"):
        allocator.reserve(table, 24)
    assert len(table.blocks) == 1
    assert allocator.blocks_free == 1


def test_rejected_nodes_free_their_blocks_at_once_with_page_rounding() -> None:
    allocator = BlockAllocator(blocks_total=4, block_size=8)
    table = BlockTable()
    allocator.reserve(table, 7)
    table.stored_len = 7
    allocator.reserve(table, 7 + 12)
    assert allocator.blocks_free == 1
    allocator.truncate(table, 9)
    assert len(table.blocks) == 2
    allocator.truncate(table, 8)
    assert len(table.blocks) == 1
    assert table.stored_len == 7


def test_a_fork_shares_until_someone_writes() -> None:
    allocator = BlockAllocator(blocks_total=4, block_size=8)
    parent = BlockTable()
    allocator.reserve(parent, 12)
    parent.stored_len = 12
    child = allocator.fork(parent)
    assert child.blocks == parent.blocks
    assert allocator.blocks_free == 2
    copies = allocator.reserve(child, 13)
    assert [copy.source for copy in copies] == [parent.blocks[1]]
    assert child.blocks[0] == parent.blocks[0]
    assert child.blocks[1] != parent.blocks[1]
    assert allocator.reserve(parent, 13) == ()  # the parent is its block's only holder again
    allocator.release(parent)
    allocator.release(child)
    assert allocator.blocks_free == 4


def test_a_fork_does_not_share_what_is_only_reserved() -> None:
    allocator = BlockAllocator(blocks_total=4, block_size=8)
    parent = BlockTable()
    allocator.reserve(parent, 24)
    parent.stored_len = 8
    child = allocator.fork(parent)
    assert len(child.blocks) == 1


def test_copying_counts_against_the_pool_before_anything_is_copied() -> None:
    allocator = BlockAllocator(blocks_total=1, block_size=8)
    parent = BlockTable()
    allocator.reserve(parent, 4)
    parent.stored_len = 4
    child = allocator.fork(parent)
    with pytest.raises(KvPoolExhausted):
        allocator.reserve(child, 5)
    assert child.blocks == parent.blocks


def test_a_double_free_is_an_error_not_a_corruption() -> None:
    allocator = BlockAllocator(blocks_total=2, block_size=8)
    table = BlockTable()
    allocator.reserve(table, 8)
    copy = BlockTable(list(table.blocks), 0)
    allocator.release(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.release(copy)
