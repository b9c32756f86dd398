"""No block leaks and none is freed twice, whatever happens in whatever order."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.core.errors import KvPoolExhausted
from workers.model.blocks import BlockAllocator, BlockTable

BLOCKS, SIZE = 12, 4


class Lives(RuleBasedStateMachine):
    """Admit, step with a tree, accept some of it, fork and release, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS, SIZE)
        self.tables: list[BlockTable] = []

    @rule(prompt=st.integers(1, 20))
    def admit(self, prompt: int) -> None:
        table = BlockTable()
        if self._reserved(table, prompt):
            table.stored_len = prompt
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tree=st.integers(0, 9), accepted=st.integers(0, 9))
    def step(self, data: st.DataObject, tree: int, accepted: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if self._reserved(table, table.stored_len + 1 + tree):
            table.stored_len += 1 + min(accepted, tree)
            self.allocator.truncate(table, table.stored_len)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.tables.append(self.allocator.fork(data.draw(st.sampled_from(self.tables))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        for _ in range(1 + twice):
            self.allocator.release(table)

    def _reserved(self, table: BlockTable, length: int) -> bool:
        before = (list(table.blocks), self.allocator.blocks_free)
        try:
            self.allocator.reserve(table, length)
        except KvPoolExhausted:
            assert (table.blocks, self.allocator.blocks_free) == before
            return False
        first = table.stored_len // SIZE
        holders = Counter(block for other in self.tables if other is not table for block in other.blocks)
        assert all(holders[block] == 0 for block in table.blocks[first:])
        return True

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held = {block for table in self.tables for block in table.blocks}
        assert len(held) + self.allocator.blocks_free == BLOCKS
        assert all(len(table.blocks) * SIZE >= table.stored_len for table in self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.release(table)
        assert self.allocator.blocks_free == BLOCKS


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
