"""A fake block pool: blocks are shared by reference, copied on write, and cached while their space is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

_NAMES = count()


class FakeMemory:
    """Blocks are integers. A sequence's table lists its blocks; the last one may be half-filled."""

    def __init__(
        self, blocks: int, block_size: int, tables: Callable[[], Iterable[list[int]]], *, prefix_cache: bool
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.foreign_blocks = 0
        """Number of blocks that the test itself occupies."""
        self.prefix_cache = prefix_cache
        self._tables = tables
        self._cached: dict[tuple[str, tuple[int, ...]], int] = {}

    @property
    def blocks_free(self) -> int:
        """Number of blocks in no table, including cached ones."""
        return self.blocks - self.foreign_blocks - len(self._held())

    def needed(self, table: list[int], length: int, end: int) -> int:
        """Number of blocks for positions `length … end - 1`: new ones, and a copy of a shared half-filled one."""
        return -(-end // self.block_size) - len(table) + self._is_shared_half(table, length)

    def write(self, table: list[int], length: int, end: int) -> None:
        """Extend the table up to position `end`."""
        if self._is_shared_half(table, length):
            table[-1] = self._take()
        while len(table) * self.block_size < end:
            table.append(self._take())

    def cache(self, salt: str, tokens: Sequence[int], table: list[int]) -> None:
        """Cache full blocks under the tokens up to their end."""
        if self.prefix_cache:
            for index in range(len(tokens) // self.block_size):
                key = (salt, tuple(tokens[: (index + 1) * self.block_size]))
                self._cached.setdefault(key, table[index])

    def find(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The cached blocks of a prefix of the tokens. The last token is never part of it."""
        found: list[int] = []
        for index in range((len(tokens) - 1) // self.block_size):
            block = self._cached.get((salt, tuple(tokens[: (index + 1) * self.block_size])))
            if block is None:
                break
            found.append(block)
        return found if len(set(found) - self._held()) <= self.blocks_free else []

    def forget(self) -> None:
        """Empty the cache."""
        self._cached.clear()

    def _take(self) -> int:
        """Take a free block. Cached blocks are evicted latest first, because an end is useless without its start."""
        held = self._held()
        idle = [(key, block) for key, block in self._cached.items() if block not in held]
        surplus = len(held) + len(idle) + 1 - (self.blocks - self.foreign_blocks)
        for key, _ in idle[len(idle) - max(0, surplus) :]:
            del self._cached[key]
        return next(_NAMES)

    def _held(self) -> set[int]:
        return {block for table in self._tables() for block in table}

    def _is_shared_half(self, table: list[int], length: int) -> bool:
        if length % self.block_size == 0 or not table:
            return False
        return sum(table[-1] in other for other in self._tables()) > 1
