"""An expander without tensors. It derives candidates from a checksum of the text and checks every stored token."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.drafting import ANY_TOKENS, NextTokens
from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.ports import SourceStates
from cluster.core.request import SequenceStart
from workers.draft.common.trees.expander import DraftedToken, ExpansionRow
from workers.kv.allocator import BlockAllocator, BlockCopy
from workers.kv.block_table import BlockTable

BLOCK = 4
VOCABULARY = 7
CONFIDENCES = (0.6, 0.2, 0.1)
"""Confidence in the candidates, by rank."""


def ranked(tokens: Sequence[int], known: NextTokens = ANY_TOKENS, depth: int = 0) -> list[int]:
    """Three distinct candidates that depend on every token before them, of those that a grammar permits."""
    first = zlib.crc32(bytes(tokens)) % VOCABULARY
    order = [(first + step) % VOCABULARY for step in range(VOCABULARY)]
    return [token for token in order if known.permits(depth, token)][:3]


def continued(tokens: Sequence[int], count: int) -> list[int]:
    """The greedy continuation by `count` tokens."""
    found = list(tokens)
    for _ in range(count):
        found.append(ranked(found)[0])
    return found[len(tokens) :]


class FakeMemory(BlockAllocator):
    """KV memory whose blocks store tokens, so that the use of a wrong block is detected."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, KvLayout(BLOCK), prefix_cache=False)
        self._content: dict[tuple[BlockId, int], int] = {}

    def reserve(self, table: BlockTable, length: int) -> tuple[BlockCopy, ...]:
        copies = super().reserve(table, length)
        for copy in copies:
            for offset in range(BLOCK):
                self._content[copy.destination, offset] = self._content.get((copy.source, offset), -1)
        return copies

    def write(self, table: BlockTable, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, table.stored_len):
            self._content[table.blocks[0][position // BLOCK], position % BLOCK] = token

    def read(self, table: BlockTable) -> list[int]:
        rows = (divmod(position, BLOCK) for position in range(table.stored_len))
        return [self._content[table.blocks[0][block], offset] for block, offset in rows]

    @property
    def blocks_held(self) -> int:
        return self.blocks_total - self.blocks_free


class FakeExpander:
    """Drafts the candidates of `ranked` and records the passes."""

    max_context_len = 1000

    def __init__(
        self, blocks: int = 100, confidences: Sequence[float] = CONFIDENCES, vocabulary_size: int | None = None
    ) -> None:
        self._memory = FakeMemory(blocks)
        self._confidences = confidences
        self.vocabulary_size = vocabulary_size
        self.passes: list[list[int]] = []
        """Number of tokens of each row, for each pass."""
        self.failing = False

    @property
    def memory(self) -> FakeMemory:
        return self._memory

    def expand(self, rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        if self.failing:
            raise RuntimeError("out of memory")
        self.passes.append([len(row.tokens) for row in rows])
        assert len({id(row.table) for row in rows}) == len(rows)
        for row in rows:  # as in a forward pass, all rows write before any row reads
            assert row.tokens
            assert self.vocabulary_size is None or max(row.tokens) < self.vocabulary_size
            self.memory.write(row.table, row.tokens)
        found: list[tuple[DraftedToken, ...]] = []
        for row in rows:
            self.memory.commit(row.table, row.tokens)
            assert self.memory.read(row.table) == row.table.tokens
            drafted = zip(ranked(row.table.tokens, row.next_tokens, row.depth - 1), self._confidences, strict=False)
            found.append(tuple(drafted) if row.is_last else ())
        return found


@dataclass(frozen=True)
class FakeSource:
    """A source that was given room."""

    tokens: tuple[int, ...]
    expander: SourcedFakeExpander
    table: BlockTable

    def close(self) -> None:
        self.expander.source_blocks -= len(self.table.blocks[0])
        self.expander.memory.release(self.table)


class SourcedFakeExpander(FakeExpander):
    """Checks that every row of a sequence with a source comes with this source, which has blocks of its own."""

    source_blocks = 0

    def open_source(self, start: SequenceStart) -> FakeSource | None:
        if not start.source:
            return None
        table = self.memory.new_table()
        self.memory.reserve(table, len(start.source))
        self.source_blocks += len(table.blocks[0])
        return FakeSource(start.source, self, table)

    def read_sources_from(self, states: SourceStates) -> None:
        pass

    def expand(self, rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        for row in rows:
            assert (row.source.tokens if isinstance(row.source, FakeSource) else ()) == row.start.source
        return super().expand(rows)
