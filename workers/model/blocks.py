"""Which block belongs to whom: integers only, no tensor.

A `BlockTable` lists, in order, the blocks that hold one sequence's keys and values. Blocks are
counted, so that forked sequences share them; whoever wants to write into a shared block gets a copy
of its own first (copy-on-write). Every method leaves things as they were when it raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import BlockId


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks; the first `stored_len` tokens in them are committed."""

    blocks: list[BlockId] = field(default_factory=list)
    stored_len: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Before the next write, the content of `source` must be copied to `destination`."""

    source: BlockId
    destination: BlockId


class BlockAllocator:
    """A fixed number of blocks of `block_size` tokens, with reference counts."""

    def __init__(self, blocks_total: int, block_size: int) -> None:
        self.blocks_total = blocks_total
        self.block_size = block_size
        self._free = [BlockId(block) for block in reversed(range(blocks_total))]
        self._references = [0] * blocks_total

    @property
    def blocks_free(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens take, the last one rounded up."""
        return -(-length // self.block_size)

    def reserve(self, table: BlockTable, length: int) -> tuple[BlockCopy, ...]:
        """Make positions `table.stored_len … length - 1` writable by this table alone.

        Returns the copies that must be made first. Raises `KvPoolExhausted`, having changed nothing.
        """
        first_written = table.stored_len // self.block_size
        shared = [
            index for index in range(first_written, len(table.blocks)) if self._references[table.blocks[index]] > 1
        ]
        missing = max(0, self.blocks_for(length) - len(table.blocks))
        if len(shared) + missing > self.blocks_free:
            raise KvPoolExhausted(
                f"{len(shared) + missing} KV blocks are needed for {length} tokens and "
                f"{self.blocks_free} of {self.blocks_total} are free"
            )
        copies = []
        for index in shared:
            source, destination = table.blocks[index], self._take()
            self._drop(source)
            table.blocks[index] = destination
            copies.append(BlockCopy(source, destination))
        table.blocks.extend(self._take() for _ in range(missing))
        return tuple(copies)

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keep the blocks of the first `length` tokens and free the rest at once."""
        keep = self.blocks_for(length)
        for block in table.blocks[keep:]:
            self._drop(block)
        del table.blocks[keep:]
        table.stored_len = min(table.stored_len, length)

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table over the same stored tokens; takes no block until someone writes."""
        blocks = table.blocks[: self.blocks_for(table.stored_len)]
        for block in blocks:
            self._references[block] += 1
        return BlockTable(list(blocks), table.stored_len)

    def release(self, table: BlockTable) -> None:
        """Give everything back. Releasing twice is harmless: the table is empty after the first."""
        self.truncate(table, 0)

    def _take(self) -> BlockId:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _drop(self, block: BlockId) -> None:
        if self._references[block] < 1:
            raise RuntimeError(f"KV block {block} is freed twice")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)
