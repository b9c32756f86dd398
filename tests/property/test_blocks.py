"""No block leaks, is freed twice, or is read with the content of another block, for any order of operations."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.allocator import BlockAllocator
from workers.kv.block_table import OUT_OF_WINDOW, BlockTable

SIZE = 4
LAYOUTS = [
    KvLayout(SIZE),
    KvLayout(SIZE, (KvGroup(2), KvGroup(1, window=6))),
    KvLayout(SIZE, (KvGroup(1, window=5),)),
    KvLayout(SIZE, (KvGroup(1, window=2), KvGroup(2, window=9, sinks=5))),
]
POLICIES: list[dict[str, Any]] = [{}]
"""Further arguments of `BlockAllocator`, by name: a case for each policy of eviction."""
Content = dict[int, tuple[object, ...]]
"""Maps an offset in a block to the owner of its keys: the salt, the table and all tokens up to the position."""

few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=22)


class BlockTables(RuleBasedStateMachine):
    """Tables are opened, forked, stepped with a tree and released at random. Evicted blocks may be loaded again."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        spare=st.integers(1, 12),
        cached=st.sampled_from([True, True, False]),
        moved_out=st.booleans(),
        policy=st.sampled_from(POLICIES),
    )
    def begin(self, layout: KvLayout, spare: int, cached: bool, moved_out: bool, policy: dict[str, Any]) -> None:
        self.layout = layout
        self.blocks_total = 6 * layout.tables + spare
        self.allocator = BlockAllocator(self.blocks_total, layout, cached, self.evicted, **policy)
        self.tables: list[BlockTable] = []
        self.seen: list[tuple[list[int], str]] = []
        self.salts: dict[int, str] = {}
        self.memory: list[Content] = [{} for _ in range(self.blocks_total)]
        self.moved_out: dict[bytes, Content] | None = {} if moved_out else None

    def evicted(self, key: bytes, block: BlockId) -> None:
        if self.moved_out is not None:
            self.moved_out[key] = dict(self.memory[block])

    @rule(tokens=few_tokens, salt=st.sampled_from(["", "tenant"]))
    def open_new(self, tokens: list[int], salt: str) -> None:
        self._open(tokens, salt, None)

    @rule(data=st.data(), more=few_tokens, other_salt=st.booleans(), replaced=st.booleans())
    def open_with_shared_prefix(self, data: st.DataObject, more: list[int], other_salt: bool, replaced: bool) -> None:
        parent = self._any(data)
        kept = data.draw(st.integers(0, parent.stored_len))
        salt = "other" if other_salt else self.salts[id(parent)]
        self._open([*parent.tokens[:kept], *more], salt, parent, replaced)

    @rule(data=st.data(), more=few_tokens)
    def open_again(self, data: st.DataObject, more: list[int]) -> None:
        if self.seen:
            tokens, salt = data.draw(st.sampled_from(self.seen))
            self._open([*tokens, *more], salt, None)

    def _any(self, data: st.DataObject) -> BlockTable:
        if not self.tables:
            self._open([0], "", None)
        return data.draw(st.sampled_from(self.tables))

    def _open(self, tokens: list[int], salt: str, parent: BlockTable | None, replaced: bool = False) -> None:
        elsewhere = None if self.moved_out is None else self.moved_out.__contains__
        prefix = self.allocator.find(tokens, salt, parent, len(tokens) - 1, elsewhere)
        assert len(prefix) < len(tokens)
        before = self._counts()
        try:
            table, loads = self.allocator.adopt(prefix)
        except KvPoolExhausted:
            assert prefix.offloaded(), "a block in the pool was not found"
            assert self._counts() == before
            return
        for load in loads:
            assert self.moved_out is not None
            self.memory[load.destination] = dict(self.moved_out[load.key])
            self.allocator.loaded(load)
        self.salts[id(table)] = salt
        self.tables.append(table)
        assert table.tokens == tokens[: len(prefix)]
        if parent is not None and replaced:
            self._release(parent)
        self._write(table, tokens[len(prefix) :], 0, len(tokens))

    @rule(data=st.data(), chunk=st.lists(st.integers(0, 1), min_size=1, max_size=9), tree=st.integers(0, 9))
    def step(self, data: st.DataObject, chunk: list[int], tree: int) -> None:
        table = self._any(data)
        self._write(table, chunk, tree, data.draw(st.integers(0, len(chunk))))

    def _write(self, table: BlockTable, tokens: list[int], tree: int, committed: int) -> None:
        """Simulate a step: reserve blocks, write keys, commit the first `committed` tokens; 0 simulates a failure."""
        end = table.stored_len + len(tokens) + tree
        before = ([list(blocks) for blocks in table.blocks], self._counts())
        try:
            copies = self.allocator.reserve(table, end)
        except KvPoolExhausted:
            assert ([list(blocks) for blocks in table.blocks], self._counts()) == before
            return
        for copy in copies:
            self.memory[copy.destination] = dict(self.memory[copy.source])
        assert table.held == self.layout.held(table.stored_len, end)
        first = table.stored_len // SIZE
        holders = Counter(block for other in self.tables if other is not table for block in all_blocks(other))
        assert all(holders[block] == 0 for blocks in table.blocks for block in blocks[first:])
        for position in range(table.stored_len, end):
            written = (table.tokens + tokens)[: position + 1]
            for table_index, blocks in enumerate(table.blocks):
                content = (self.salts[id(table)], table_index, *written) if len(written) > position else ("draft",)
                self.memory[blocks[position // SIZE]][position % SIZE] = content
        if committed:
            self.allocator.commit(table, tokens[:committed])
            self.seen.append((list(table.tokens), self.salts[id(table)]))
        else:
            self.allocator.truncate(table, table.stored_len)

    @rule(data=st.data(), more=few_tokens)
    def fork(self, data: st.DataObject, more: list[int]) -> None:
        parent = self._any(data)
        length = data.draw(st.integers(0, parent.stored_len))
        before = self._counts()
        try:
            table = self.allocator.fork(parent, length)
        except ValueError:
            groups = self.layout.groups
            assert any(group.first_needed(length) < group.first_needed(parent.stored_len) for group in groups)
            return
        assert self._counts() == before
        assert table.tokens == parent.tokens[:length]
        self.salts[id(table)] = self.salts[id(parent)]
        self.tables.append(table)
        self._write(table, more, 0, len(more))

    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        table = self._any(data)
        self._release(table)
        if twice:
            self.allocator.release(table)

    def _release(self, table: BlockTable) -> None:
        self.tables.remove(table)
        self.allocator.release(table)
        assert table.held == 0

    def _counts(self) -> tuple[int, int]:
        return self.allocator.blocks_free, self.allocator.blocks_cached

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held = {block for table in self.tables for block in all_blocks(table)}
        assert len(held) + self.allocator.blocks_free == self.blocks_total

    @invariant()
    def every_sequence_holds_the_blocks_of_its_layout(self) -> None:
        for table in self.tables:
            assert table.held == self.layout.held(table.stored_len)

    @invariant()
    def every_read_key_belongs_to_its_sequence(self) -> None:
        groups = [group for group in self.layout.groups for _ in range(group.tables)]
        for table in self.tables:
            for table_index, (group, blocks) in enumerate(zip(groups, table.blocks, strict=True)):
                for position in range(table.stored_len):
                    if position >= group.first_needed(table.stored_len) or position < group.sinks:
                        found = self.memory[blocks[position // SIZE]][position % SIZE]
                        assert found == (self.salts[id(table)], table_index, *table.tokens[: position + 1])

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.release(table)
        assert self.allocator.blocks_free == self.blocks_total


def all_blocks(table: BlockTable) -> list[BlockId]:
    return [block for blocks in table.blocks for block in blocks if block != OUT_OF_WINDOW]


TestBlockTables = BlockTables.TestCase
TestBlockTables.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_every_argument_of_the_allocator_is_varied_here() -> None:
    varied = {"blocks_total", "layout", "prefix_cache", "on_evict"}.union(*POLICIES)
    elsewhere = {"has_state"}  # tests/unit/verify/test_recurrent_prefixes.py
    assert set(inspect.signature(BlockAllocator).parameters) == varied | elsewhere


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.groups[0].window is None])
@given(prompts=st.lists(few_tokens, min_size=1, max_size=12), held=st.booleans())
def test_no_block_is_evicted_before_the_cached_ones_behind_it(
    layout: KvLayout, policy: dict[str, Any], prompts: list[list[int]], held: bool
) -> None:
    """A block is found only behind the one before it, so blocks behind an evicted one would fill memory for nothing.

    Not with a window: what leaves it is no longer needed, and is released before the blocks behind it.
    """
    evicted: list[BlockId] = []
    allocator = BlockAllocator(80 * layout.tables, layout, on_evict=lambda _, block: evicted.append(block), **policy)
    waiting: BlockTable | None = None
    for tokens in prompts:
        table, _ = allocator.adopt(allocator.find(tokens))
        allocator.reserve(table, len(tokens))
        allocator.commit(table, tokens[table.stored_len :])
        if waiting is not None:
            allocator.release(waiting)
        waiting = table if held else allocator.release(table)
    if waiting is not None:
        allocator.release(waiting)
    chains = [blocks for tokens in prompts for blocks in allocator.find(tokens).blocks[: layout.groups[0].tables]]
    allocator.reserve(allocator.new_table(), 80 * SIZE)
    places = {block: place for place, block in enumerate(evicted)}
    for chain in chains:
        order = [places[block] for block in chain]
        assert order == sorted(order, reverse=True)
