"""A model for drafters that grow trees, without tensors: a checksum of the text guesses, and reads are checked."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from workers.draft.expansion.draft_tree import Guess
from workers.draft.expansion.expander import Place
from workers.kv.allocator import BlockAllocator, BlockCopy
from workers.kv.block_table import BlockTable

BLOCK = 4
VOCABULARY = 7
SURE = (0.6, 0.2, 0.1)
"""How sure it is of its guesses, one after another."""


def ranked(tokens: Sequence[int]) -> list[int]:
    """Three distinct guesses that depend on every token before them."""
    first = zlib.crc32(bytes(tokens)) % VOCABULARY
    return [(first + step) % VOCABULARY for step in range(3)]


def continued(tokens: Sequence[int], count: int) -> list[int]:
    """What the model would write."""
    found = list(tokens)
    for _ in range(count):
        found.append(ranked(found)[0])
    return found[len(tokens) :]


class FakeMemory(BlockAllocator):
    """Blocks that hold tokens, so that a wrong block shows."""

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
        places = (divmod(position, BLOCK) for position in range(table.stored_len))
        return [self._content[table.blocks[0][block], offset] for block, offset in places]

    @property
    def blocks_held(self) -> int:
        return self.blocks_total - self.blocks_free


class FakeExpander:
    """Remembers how many tokens went through in each pass."""

    def __init__(self, blocks: int = 100, max_context_len: int = 1000, sure: Sequence[float] = SURE) -> None:
        self._memory = FakeMemory(blocks)
        self._sure = sure
        self.max_context_len = max_context_len
        self.vocabulary_size: int | None = None
        self.passes: list[list[int]] = []
        """Tokens of each place in each pass."""
        self.failing = False

    @property
    def memory(self) -> FakeMemory:
        return self._memory

    def expand(self, places: Sequence[Place]) -> list[tuple[Guess, ...]]:
        if self.failing:
            raise RuntimeError("out of memory")
        self.passes.append([len(place.tokens) for place in places])
        assert len({id(place.table) for place in places}) == len(places)
        for place in places:  # all of them write before any is read, as in a forward pass
            assert place.tokens
            self.memory.write(place.table, place.tokens)
        found: list[tuple[Guess, ...]] = []
        for place in places:
            self.memory.commit(place.table, place.tokens)
            assert self.memory.read(place.table) == place.table.tokens
            guesses = zip(ranked(place.table.tokens), self._sure, strict=False)
            found.append(tuple(guesses) if place.is_last else ())
        return found
