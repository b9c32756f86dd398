"""The block allocator: which block belongs to which sequence. It works on integers and touches no tensor.

A `BlockTable` lists the blocks that hold one sequence's keys and values, in order, with one list for each table of
the layout. Blocks have reference counts, so sequences with a common prefix share them. A sequence that writes into
a shared block gets a copy first (copy-on-write). At each commit, groups with a window free the blocks that no later
token sees. A full, committed block that no sequence holds counts as free; its content stays in the prefix cache
until the block is needed. A method that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.block_table import OUT_OF_WINDOW, Blocks, BlockTable, Prefix, PrefixQuery, PrefixSearch, blocks_of
from workers.kv.prefix_cache import PrefixIndex, block_key, next_key, root_key


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The content of `source` must be copied to `destination` before the next write."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """The offloaded content of `key` must be copied into `destination`."""

    key: bytes
    destination: BlockId


def discard(_key: bytes, _block: BlockId) -> None:
    """Do nothing: the content of evicted blocks is lost."""


class BlockAllocator:
    """A fixed number of blocks of `layout.block_size` tokens, with reference counts.

    `on_evict(key, block)` is called before a cached block is reused; it must not raise. With `has_state`,
    sequences begin only behind full blocks for whose keys it is true.
    """

    def __init__(
        self,
        blocks_total: int,
        layout: KvLayout,
        prefix_cache: bool = True,
        on_evict: Callable[[bytes, BlockId], None] = discard,
        has_state: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.blocks_total = blocks_total
        self.layout = layout
        self.block_size = layout.block_size
        """Tokens per block."""
        self._groups: list[KvGroup] = [group for group in layout.groups for _ in range(group.tables)]
        """The group of each table."""
        self._windowed = [(table, group) for table, group in enumerate(self._groups) if group.window is not None]
        self._free = [BlockId(block) for block in reversed(range(blocks_total))]
        self._references = [0] * blocks_total
        self._index = PrefixIndex() if prefix_cache else None
        self._on_evict = on_evict
        self._has_state = has_state

    @property
    def blocks_free(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return len(self._free) + self.blocks_cached

    @property
    def blocks_cached(self) -> int:
        """Blocks that no table holds and whose content is in the prefix cache."""
        return self._index.idle if self._index is not None else 0

    def new_table(self, salt: str = "") -> BlockTable:
        """An empty block table for a new sequence."""
        return BlockTable([blocks_of() for _ in self._groups], root_key(salt))

    def reserve(self, table: BlockTable, length: int) -> tuple[BlockCopy, ...]:
        """Make positions `table.stored_len … length - 1` writable by this table alone.

        Returns the copies that must be made first. Raises `KvPoolExhausted` and changes nothing if the pool has too few
        free blocks.
        """
        first_written, needed = table.stored_len // self.block_size, self._blocks_for(length)
        references, missing = self._references, 0
        shared: list[tuple[Blocks, int]] = []
        for blocks in table.blocks:
            held = len(blocks)
            missing += max(0, needed - held)
            shared += [(blocks, index) for index in range(first_written, held) if references[blocks[index]] > 1]
        if shared or missing:
            self._check_free(len(shared) + missing, length)
        copies = []
        for blocks, index in shared:
            source, destination = blocks[index], self._allocate()
            self._release_block(source)
            blocks[index] = destination
            copies.append(BlockCopy(source, destination))
        for blocks in table.blocks:
            for index in range(first_written, len(blocks)):
                self._uncache(blocks[index])
            if needed > len(blocks):
                blocks.extend([self._allocate() for _ in range(needed - len(blocks))])
        return tuple(copies)

    def commit(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Record that the next positions hold `tokens`. Frees the blocks beyond them and those that left a window."""
        before = table.stored_len
        table.tokens.extend(tokens)
        self._cache(table)
        size = self.block_size
        for table_index, group in self._windowed:
            blocks = table.blocks[table_index]
            start = max(group.first_needed(before) // size, -(-group.sinks // size))
            for index in range(start, min(group.first_needed(table.stored_len) // size, len(blocks))):
                self._release_block(blocks[index])
                blocks[index] = OUT_OF_WINDOW
        self._trim(table)

    def truncate(self, table: BlockTable, length: int) -> None:
        """Cut the sequence to its first `length` tokens and free all other blocks.

        Raises `ValueError` if a window has already freed blocks that the shorter sequence sees.
        """
        if length < table.stored_len:
            self._check_reach(table, length)
            del table.tokens[length:]
            del table.chain[length // self.block_size :]
        self._trim(table)

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A new table that shares the blocks of the first `length` tokens of `table`, a partly filled one included.

        Allocates no block. Raises `ValueError` as `truncate` does, and for a length that is not stored.
        """
        if not 0 <= length <= table.stored_len:
            raise ValueError(f"{length} must be between 0 and the {table.stored_len} tokens that are stored")
        self._check_reach(table, length)
        count = self._blocks_for(length)
        forked = BlockTable(
            [blocks[:count] for blocks in table.blocks],
            table.root,
            table.tokens[:length],
            table.chain[: length // self.block_size],
        )
        for blocks in forked.blocks:
            for block in blocks:
                if block != OUT_OF_WINDOW:
                    self._references[block] += 1  # `table` holds it, so it is not idle
        return forked

    def release(self, table: BlockTable) -> None:
        """Free all blocks of the table and empty it. Releasing it again does nothing.

        Blocks are freed from the last to the first. So the last ones are evicted first; other sequences are more
        likely to share the first ones.
        """
        for index in reversed(range(max(map(len, table.blocks), default=0))):
            for blocks in table.blocks:
                if index < len(blocks) and blocks[index] != OUT_OF_WINDOW:
                    self._release_block(blocks[index])
        table.blocks = [blocks_of() for _ in self._groups]
        table.tokens.clear()
        table.chain.clear()

    def find(
        self,
        tokens: Sequence[int],
        salt: str = "",
        parent: BlockTable | None = None,
        max_tokens: int | None = None,
        is_offloaded: Callable[[bytes], bool] | None = None,
        chain: list[bytes] | None = None,
    ) -> Prefix:
        """Find the longest prefix of `tokens`, at most `max_tokens`, whose blocks are stored.

        Blocks are looked for in the parent's table, in the prefix cache and among those for which
        `is_offloaded(key)` is true. Only blocks with the same salt match. The parent's last block may be partly
        filled. `chain` receives the keys of the full blocks, so that the next search for these tokens need not
        hash them again; nothing else changes.
        """
        max_tokens = len(tokens) if max_tokens is None else max_tokens
        query = PrefixQuery(root_key(salt), tokens, max_tokens, parent, [] if chain is None else chain)
        return PrefixSearch(self.layout, self._index, is_offloaded, self._has_state).longest(query)

    def adopt(self, prefix: Prefix) -> tuple[BlockTable, tuple[BlockLoad, ...]]:
        """Make a table that begins with `prefix`: share its blocks, and allocate blocks for its offloaded ones.

        Returns the table and the loads that must be made. Raises `KvPoolExhausted` and changes nothing if the pool
        has too few free blocks.
        """
        missing = prefix.offloaded()
        hits = [block for blocks in prefix.blocks for block in blocks if block >= 0]
        idle = sum(self._references[block] == 0 for block in hits)
        self._check_free(idle + len(missing), len(prefix))
        for block in hits:
            self._acquire(block)
        table = BlockTable(
            [blocks_of(blocks) for blocks in prefix.blocks], prefix.root, list(prefix.tokens), list(prefix.chain)
        )
        loads = []
        for key, table_index, index in missing:
            table.blocks[table_index][index] = block = self._allocate()
            loads.append(BlockLoad(key, block))
        return table, tuple(loads)

    def loaded(self, load: BlockLoad) -> None:
        """Add a loaded block to the prefix cache."""
        if self._index is not None:
            self._index.add(load.key, load.destination)

    def _check_reach(self, table: BlockTable, length: int) -> None:
        for group in self.layout.groups:
            if group.first_needed(length) // self.block_size < group.first_needed(table.stored_len) // self.block_size:
                raise ValueError(
                    f"a table of {table.stored_len} tokens cannot be cut to {length}: a window has freed blocks of it"
                )

    def _cache(self, table: BlockTable) -> None:
        """Add every full block that has no key yet to the prefix cache."""
        if self._index is None:
            return
        size = self.block_size
        for index in range(len(table.chain), table.stored_len // size):
            before = table.chain[-1] if table.chain else table.root
            table.chain.append(next_key(before, table.tokens[index * size : (index + 1) * size]))
            for table_index, blocks in enumerate(table.blocks):
                if blocks[index] != OUT_OF_WINDOW:
                    self._index.add(block_key(table.chain[index], table_index), blocks[index])

    def _trim(self, table: BlockTable) -> None:
        """Free the blocks beyond the stored tokens."""
        needed = self._blocks_for(table.stored_len)
        for blocks in table.blocks:
            if len(blocks) > needed:
                for block in blocks[needed:]:
                    if block != OUT_OF_WINDOW:
                        self._release_block(block)
                del blocks[needed:]

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _check_free(self, needed: int, length: int) -> None:
        if needed > self.blocks_free:
            raise KvPoolExhausted(
                f"{needed} KV blocks are needed for {length} tokens and "
                f"{self.blocks_free} of {self.blocks_total} are free"
            )

    def _allocate(self) -> BlockId:
        if self._free:
            block = self._free.pop()
        elif self._index is not None:
            key, block = self._index.evict()
            self._on_evict(key, block)
        else:
            raise RuntimeError("a block is taken from an empty pool")
        self._references[block] = 1
        return block

    def _acquire(self, block: BlockId) -> None:
        if self._references[block] == 0 and self._index is not None:
            self._index.mark_used(block)
        self._references[block] += 1

    def _release_block(self, block: BlockId) -> None:
        if self._references[block] < 1:
            raise RuntimeError(f"KV block {block} is freed twice")
        self._references[block] -= 1
        if self._references[block] == 0 and (self._index is None or not self._index.mark_idle(block)):
            self._free.append(block)

    def _uncache(self, block: BlockId) -> None:
        """Remove a block from the prefix cache, because its only holder is about to write into it."""
        key = self._index.forget(block) if self._index is not None else None
        if key is not None:
            self._on_evict(key, block)
