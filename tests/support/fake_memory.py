"""A pool of blocks in a few lines: shared by reference, copied on write, remembered while nobody needs the room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

_NAMES = count()


class FakeMemory:
    """Blocks are integers. A sequence's table lists those of its tokens, the last one half-filled."""

    def __init__(
        self, blocks: int, block_size: int, tables: Callable[[], Iterable[list[int]]], *, remembers: bool
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.foreign_blocks = 0
        """Blocks that somebody else holds."""
        self.remembers = remembers
        self._tables = tables
        self._remembered: dict[tuple[str, tuple[int, ...]], int] = {}

    @property
    def blocks_free(self) -> int:
        """Blocks that no table names; what is remembered in them gives way."""
        return self.blocks - self.foreign_blocks - len(self._held())

    def needed(self, table: list[int], length: int, end: int) -> int:
        """Blocks that writing positions `length … end - 1` takes: new ones, and a copy of a shared half-filled one."""
        return -(-end // self.block_size) - len(table) + self._is_shared_half(table, length)

    def write(self, table: list[int], length: int, end: int) -> None:
        """Give the table room up to `end`."""
        if self._is_shared_half(table, length):
            table[-1] = self._take()
        while len(table) * self.block_size < end:
            table.append(self._take())

    def remember(self, salt: str, tokens: Sequence[int], table: list[int]) -> None:
        """Keep full blocks findable by the tokens up to their end."""
        if self.remembers:
            for index in range(len(tokens) // self.block_size):
                key = (salt, tuple(tokens[: (index + 1) * self.block_size]))
                self._remembered.setdefault(key, table[index])

    def find(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The remembered blocks of leading tokens; the last token is left out."""
        found: list[int] = []
        for index in range((len(tokens) - 1) // self.block_size):
            block = self._remembered.get((salt, tuple(tokens[: (index + 1) * self.block_size])))
            if block is None:
                break
            found.append(block)
        return found if len(set(found) - self._held()) <= self.blocks_free else []

    def forget(self) -> None:
        """Everything that was remembered."""
        self._remembered.clear()

    def _take(self) -> int:
        """A block that nobody holds; what was remembered last goes first: an end is of no use without its beginning."""
        held = self._held()
        idle = [(key, block) for key, block in self._remembered.items() if block not in held]
        surplus = len(held) + len(idle) + 1 - (self.blocks - self.foreign_blocks)
        for key, _ in idle[len(idle) - max(0, surplus) :]:
            del self._remembered[key]
        return next(_NAMES)

    def _held(self) -> set[int]:
        return {block for table in self._tables() for block in table}

    def _is_shared_half(self, table: list[int], length: int) -> bool:
        if length % self.block_size == 0 or not table:
            return False
        return sum(table[-1] in other for other in self._tables()) > 1
