"""The paged KV memory of a simulated target: reference counts, copy-on-write and a prefix cache, without contents."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from cluster.core.errors import KvPoolExhausted, PilotfishError
from cluster.core.kv import KvOccupancy

BlockKey = tuple[str, int, int]
"""Salt, end position and model state at the end of a full block."""


class BlocksNotConserved(PilotfishError):
    """The blocks in tables, in the cache and free are not all blocks."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence. The last one may be half-filled."""

    blocks: list[int] = field(default_factory=list)


class BlockMemory:
    """A pool of `total` blocks of `block_size` positions."""

    def __init__(self, total: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.total = total
        self.block_size = block_size
        self.occupied = 0
        """Blocks that something else than a sequence takes away: a simulated shortage."""
        self._has_cache = prefix_cache
        self._references = [0] * total
        self._unused = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, BlockKey] = OrderedDict()
        """Cached blocks in no table, least recently used first."""
        self._cached: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}

    @property
    def free(self) -> int:
        """Blocks that sequences can take, including cached ones in no table."""
        return max(0, len(self._unused) + len(self._idle) - self.occupied)

    def occupancy(self) -> KvOccupancy:
        """The occupancy as the target reports it."""
        return KvOccupancy(self.total, self.free)

    def reserve(self, table: BlockTable, length: int, end: int) -> None:
        """Extend the table up to position `end`; the first `length` positions are stored.

        Raises `KvPoolExhausted`, and changes nothing then.
        """
        copies = self._is_shared_half(table, length)
        if -(-end // self.block_size) - len(table.blocks) + copies > self.free:
            raise KvPoolExhausted(f"{self.free} of {self.total} blocks are free")
        if copies:
            shared = table.blocks.pop()
            table.blocks.append(self._take())
            self._give_back(shared)
        while len(table.blocks) * self.block_size < end:
            table.blocks.append(self._take())

    def truncate(self, table: BlockTable, length: int) -> None:
        """Free the blocks after the first `length` positions."""
        while len(table.blocks) * self.block_size >= length + self.block_size:
            self._give_back(table.blocks.pop())

    def release(self, table: BlockTable) -> None:
        """Free all blocks of a table, the last first."""
        while table.blocks:
            self._give_back(table.blocks.pop())

    def share(self, table: BlockTable, length: int) -> BlockTable:
        """A new table with the blocks of the first `length` positions of another."""
        blocks = table.blocks[: -(-length // self.block_size)]
        for block in blocks:
            self._acquire(block)
        return BlockTable(blocks)

    def find(self, salt: str, ends: list[tuple[int, int]]) -> BlockTable:
        """A new table with the cached blocks of a prefix. `ends` are (end, state) of the full blocks, in order."""
        table = BlockTable()
        for end, state in ends:
            block = self._cached.get((salt, end, state))
            if block is None or (self._references[block] == 0 and self.free < 1):
                break
            self._acquire(block)
            table.blocks.append(block)
        return table

    def store(self, salt: str, table: BlockTable, ends: list[tuple[int, int]]) -> None:
        """Put full, committed blocks into the prefix cache. `ends` are (end, state) of these blocks."""
        if not self._has_cache:
            return
        for end, state in ends:
            key, block = (salt, end, state), table.blocks[end // self.block_size - 1]
            if key not in self._cached and block not in self._keys:
                self._cached[key] = block
                self._keys[block] = key

    def check(self, tables: list[BlockTable]) -> None:
        """Compare the counts with the tables of all sequences. Raises `BlocksNotConserved`."""
        held = [0] * self.total
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        if held != self._references:
            raise BlocksNotConserved("the reference counts differ from the block tables")
        in_use = sum(count > 0 for count in held)
        if in_use + len(self._idle) + len(self._unused) != self.total:
            raise BlocksNotConserved(f"{in_use} used, {len(self._idle)} cached and {len(self._unused)} unused blocks")

    def _take(self) -> int:
        if self._unused:
            block = self._unused.pop()
        else:
            block, key = self._idle.popitem(last=False)
            del self._cached[key], self._keys[block]
        self._references[block] = 1
        return block

    def _acquire(self, block: int) -> None:
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1

    def _give_back(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        key = self._keys.get(block)
        if key is None:
            self._unused.append(block)
        else:
            self._idle[block] = key

    def _is_shared_half(self, table: BlockTable, length: int) -> bool:
        blocks = -(-length // self.block_size)
        return length % self.block_size > 0 and len(table.blocks) == blocks and self._references[table.blocks[-1]] > 1
