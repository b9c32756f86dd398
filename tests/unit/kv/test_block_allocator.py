"""The block allocator reserves, shares, caches and frees blocks. It handles block numbers only, no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.allocator import BlockAllocator
from workers.kv.block_table import OUT_OF_WINDOW, BlockTable

FULL = KvLayout(8)
WINDOW = KvLayout(8, (KvGroup(window=10),))


def stored(allocator: BlockAllocator, tokens: Sequence[int], salt: str = "") -> BlockTable:
    table = allocator.new_table(salt)
    allocator.reserve(table, len(tokens))
    allocator.commit(table, tokens)
    return table


def opened(
    allocator: BlockAllocator, tokens: Sequence[int], salt: str = "", parent: BlockTable | None = None
) -> BlockTable:
    table, loads = allocator.adopt(allocator.find(tokens, salt, parent))
    assert loads == ()
    return table


def test_a_table_takes_whole_blocks_and_frees_them() -> None:
    allocator = BlockAllocator(4, FULL)
    table = allocator.new_table()
    allocator.reserve(table, 17)
    assert table.held == 3
    assert allocator.blocks_free == 1
    allocator.release(table)
    assert allocator.blocks_free == 4


def test_a_table_has_its_blocks_as_a_step_copies_them_however_they_came_into_it() -> None:
    allocator = BlockAllocator(12, FULL)
    parent = stored(allocator, range(20))
    allocator.release(stored(allocator, range(100, 124)))
    found = [parent, opened(allocator, range(20), parent=parent), opened(allocator, range(100, 124))]
    found += [allocator.fork(parent, 12), allocator.new_table()]
    for table in found:
        allocator.reserve(table, table.stored_len + 1)
        (blocks,) = table.blocks
        assert isinstance(blocks, array) and blocks.typecode == "i"
    assert [table.held for table in found] == [3, 3, 4, 2, 1]


def test_a_refused_reservation_changes_nothing() -> None:
    allocator = BlockAllocator(2, FULL)
    table = allocator.new_table()
    allocator.reserve(table, 8)
    with pytest.raises(KvPoolExhausted, match="2 KV blocks are needed for 24 tokens and 1 of 2"):
        allocator.reserve(table, 24)
    assert table.held == 1
    assert allocator.blocks_free == 1


def test_rejected_nodes_free_their_blocks_at_once_with_page_rounding() -> None:
    allocator = BlockAllocator(4, FULL)
    table = stored(allocator, range(7))
    allocator.reserve(table, 7 + 12)
    assert allocator.blocks_free == 1
    allocator.commit(table, [7, 8])
    assert (table.held, table.stored_len) == (2, 9)
    allocator.truncate(table, 8)
    assert (table.held, table.stored_len) == (1, 8)


def test_a_child_shares_blocks_until_one_side_writes() -> None:
    allocator = BlockAllocator(4, FULL)
    parent = stored(allocator, range(12))
    child = opened(allocator, range(12), parent=parent)
    assert child.blocks == parent.blocks
    assert allocator.blocks_free == 2
    copies = allocator.reserve(child, 13)
    assert [copy.source for copy in copies] == [parent.blocks[0][1]]
    assert child.blocks[0][0] == parent.blocks[0][0]
    assert child.blocks[0][1] != parent.blocks[0][1]
    assert allocator.reserve(parent, 13) == ()  # only the parent references its block again
    allocator.release(parent)
    allocator.release(child)
    assert allocator.blocks_free == 4


def test_a_child_does_not_share_reserved_blocks() -> None:
    allocator = BlockAllocator(4, FULL)
    parent = stored(allocator, range(8))
    allocator.reserve(parent, 24)
    assert opened(allocator, range(24), parent=parent).held == 1


def test_a_child_shares_the_common_prefix() -> None:
    allocator = BlockAllocator(4, FULL, prefix_cache=False)
    parent = stored(allocator, range(20))
    child = opened(allocator, [*range(13), 0, 0], parent=parent)
    assert child.tokens == list(range(13))
    assert child.blocks[0] == parent.blocks[0][:2]
    assert opened(allocator, range(20), "another tenant", parent).stored_len == 0


def test_a_fork_shares_any_prefix_and_takes_no_block_until_one_side_writes() -> None:
    allocator = BlockAllocator(5, FULL)
    trunk = stored(allocator, range(20))
    branch, twig = allocator.fork(trunk, 12), allocator.fork(trunk, 8)
    assert (branch.tokens, branch.blocks) == (list(range(12)), [trunk.blocks[0][:2]])
    assert (twig.tokens, twig.blocks) == (list(range(8)), [trunk.blocks[0][:1]])
    assert allocator.blocks_free == 2
    copies = allocator.reserve(branch, 13)
    assert [copy.source for copy in copies] == [trunk.blocks[0][1]]
    assert allocator.reserve(twig, 9) == ()  # no token of its last block is stored
    for table in (trunk, branch, twig):
        allocator.release(table)
    assert allocator.blocks_free == 5


@pytest.mark.parametrize("length", [-1, 21])
def test_a_fork_is_no_longer_than_the_stored_tokens(length: int) -> None:
    allocator = BlockAllocator(5, FULL)
    with pytest.raises(ValueError, match=f"{length} must be between 0 and the 20 tokens that are stored"):
        allocator.fork(stored(allocator, range(20)), length)


def test_copies_count_against_the_pool_before_anything_is_copied() -> None:
    allocator = BlockAllocator(1, FULL)
    parent = stored(allocator, range(4))
    child = opened(allocator, range(4), parent=parent)
    with pytest.raises(KvPoolExhausted):
        allocator.reserve(child, 5)
    assert child.blocks == parent.blocks


def test_a_double_free_is_an_error_not_a_corruption() -> None:
    allocator = BlockAllocator(2, FULL)
    table = allocator.new_table()
    allocator.reserve(table, 8)
    copy = BlockTable([blocks[:] for blocks in table.blocks], table.root)
    allocator.release(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.release(copy)


# --- the prefix cache -------------------------------------------------------------------------


def test_full_blocks_outlive_their_sequence_and_count_as_free() -> None:
    allocator = BlockAllocator(4, FULL)
    blocks = list(stored(allocator, range(20)).blocks[0])
    again = opened(allocator, [*range(17), 0])
    assert again.tokens == list(range(16))
    assert list(again.blocks[0]) == blocks[:2]


def test_released_blocks_are_found_and_free() -> None:
    allocator = BlockAllocator(4, FULL)
    table = stored(allocator, range(20))
    blocks = list(table.blocks[0])
    allocator.release(table)
    assert (allocator.blocks_free, allocator.blocks_cached) == (4, 2)
    assert list(opened(allocator, range(20)).blocks[0]) == blocks[:2]
    assert allocator.blocks_free == 2


@pytest.mark.parametrize(
    ("tokens", "salt"), [([1, *range(1, 20)], ""), (range(20), "another tenant"), (range(7), "")], ids=str
)
def test_blocks_after_a_different_beginning_are_not_shared(tokens: Sequence[int], salt: str) -> None:
    allocator = BlockAllocator(4, FULL)
    allocator.release(stored(allocator, range(20)))
    assert opened(allocator, tokens, salt).stored_len == 0


def test_a_block_is_not_shared_before_it_is_committed() -> None:
    allocator = BlockAllocator(4, FULL)
    table = allocator.new_table()
    allocator.reserve(table, 16)
    assert opened(allocator, range(16)).stored_len == 0
    allocator.commit(table, range(9))
    assert opened(allocator, range(16)).stored_len == 8


def test_eviction_takes_ends_first_and_the_least_recently_used_sequence_before_others() -> None:
    evicted: list[BlockId] = []
    allocator = BlockAllocator(6, FULL, on_evict=lambda _, block: evicted.append(block))
    early, late = stored(allocator, range(24)), stored(allocator, range(100, 124))
    first, second = list(early.blocks[0]), list(late.blocks[0])
    allocator.release(early)
    allocator.release(late)
    allocator.release(opened(allocator, range(8)))  # used again, so it is the most recent one
    allocator.reserve(allocator.new_table(), 48)
    assert evicted == [*reversed(first[1:]), *reversed(second), first[0]]


def test_the_key_of_an_evicted_block_is_reported_when_the_block_is_taken() -> None:
    evicted: dict[bytes, BlockId] = {}
    allocator = BlockAllocator(2, FULL, on_evict=evicted.__setitem__)
    table = stored(allocator, range(16))
    blocks = list(table.blocks[0])
    allocator.release(table)
    other = stored(allocator, range(100, 116))
    assert sorted(evicted.values()) == sorted(blocks)
    allocator.release(other)
    prefix = allocator.find(range(16), is_offloaded=evicted.__contains__)
    assert [key for key, _, _ in prefix.offloaded()] == [
        key for block in blocks for key, b in evicted.items() if b == block
    ]
    table, loads = allocator.adopt(prefix)
    assert list(table.blocks[0]) == [load.destination for load in loads]
    assert allocator.find(range(16)).tokens == ()  # the content is not loaded yet
    for load in loads:
        allocator.loaded(load)
    assert len(allocator.find(range(16))) == 16


def test_blocks_of_a_hit_are_not_evicted_for_blocks_to_load() -> None:
    allocator = BlockAllocator(3, FULL)
    allocator.release(stored(allocator, range(16)))
    held = stored(allocator, [50])
    prefix = allocator.find(range(24), is_offloaded=lambda _: True)
    with pytest.raises(KvPoolExhausted):
        allocator.adopt(prefix)
    assert (allocator.blocks_free, allocator.blocks_cached) == (2, 2)
    allocator.release(held)
    table, loads = allocator.adopt(prefix)
    assert (table.stored_len, len(loads)) == (24, 1)


def test_writing_into_a_cached_block_removes_its_key() -> None:
    allocator = BlockAllocator(4, FULL)
    parent = stored(allocator, range(8))
    child = opened(allocator, [*range(6), 0], parent=parent)
    allocator.release(parent)
    assert allocator.reserve(child, 7) == ()  # no other table references it
    assert opened(allocator, range(8)).stored_len == 0


def test_without_a_prefix_cache_only_parents_share_blocks() -> None:
    allocator = BlockAllocator(4, FULL, prefix_cache=False)
    table = stored(allocator, range(16))
    assert opened(allocator, range(16)).stored_len == 0
    assert opened(allocator, range(16), parent=table).stored_len == 16


# --- windows ----------------------------------------------------------------------------------


def test_blocks_outside_the_window_are_freed_at_commit_and_not_before() -> None:
    allocator = BlockAllocator(6, WINDOW)
    table = stored(allocator, range(16))
    assert table.held == 2
    allocator.reserve(table, 26)
    assert table.held == 4
    allocator.commit(table, range(16, 25))  # the next token sees positions 16 to 25
    assert list(table.blocks[0][:2]) == [OUT_OF_WINDOW, OUT_OF_WINDOW]
    assert (table.held, allocator.blocks_free) == (2, 4)


def test_attention_sinks_are_not_freed() -> None:
    allocator = BlockAllocator(8, KvLayout(8, (KvGroup(window=10, sinks=9),)))
    table = stored(allocator, range(40))
    assert [block != OUT_OF_WINDOW for block in table.blocks[0]] == [True, True, False, True, True]


def test_every_group_has_its_own_blocks() -> None:
    layout = KvLayout(8, (KvGroup(2), KvGroup(3, window=10)))
    allocator = BlockAllocator(40, layout)
    table = stored(allocator, range(40))
    assert [sum(block != OUT_OF_WINDOW for block in blocks) for blocks in table.blocks] == [5, 5, 2, 2, 2]
    assert table.held == layout.held(40)
    assert len({block for blocks in table.blocks for block in blocks if block != OUT_OF_WINDOW}) == table.held


def test_a_shorter_prefix_is_a_hit_only_if_its_window_is_still_cached() -> None:
    allocator = BlockAllocator(6, WINDOW)
    table = stored(allocator, range(40))
    shorter = opened(allocator, [*range(16), 0], parent=table)
    assert shorter.stored_len == 16  # the cache still holds blocks outside the window
    allocator.release(shorter)
    other = allocator.new_table()
    allocator.reserve(other, 24)  # takes the free block, the third and the second
    assert opened(allocator, [*range(16), 0]).stored_len == 8
    again = opened(allocator, range(40))
    assert list(again.blocks[0][:3]) == [OUT_OF_WINDOW, OUT_OF_WINDOW, OUT_OF_WINDOW]
    assert again.stored_len == 40


def test_a_half_filled_block_is_shared_only_with_its_window() -> None:
    allocator = BlockAllocator(6, WINDOW, prefix_cache=False)
    parent = stored(allocator, range(22))
    assert opened(allocator, [*range(21), 0], parent=parent).stored_len == 21
    assert opened(allocator, [*range(14), 0], parent=parent).stored_len == 0


def test_a_table_cannot_be_cut_to_a_length_whose_window_was_freed() -> None:
    allocator = BlockAllocator(6, WINDOW)
    table = stored(allocator, range(30))
    with pytest.raises(ValueError, match="cannot be cut to 12"):
        allocator.truncate(table, 12)
    with pytest.raises(ValueError, match="cannot be cut to 12"):
        allocator.fork(table, 12)
    assert (table.stored_len, table.held) == (30, 2)
