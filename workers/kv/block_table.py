"""A sequence's block table, and the search for stored blocks that a new sequence can begin with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.prefix_cache import PrefixIndex, block_key, next_key

if TYPE_CHECKING:
    from workers.kv.states import SequenceStates

OUT_OF_WINDOW = BlockId(-1)
"""Entry of a block table whose block was freed because it left the attention window."""
OFFLOADED = BlockId(-2)
"""Entry of a prefix whose block is not in the pool but in host memory or on disk."""


def _no_states() -> SequenceStates:
    from workers.kv.states import SequenceStates  # imports torch, and drafting methods without tensors use tables

    return SequenceStates()


Blocks = MutableSequence[BlockId]
"""Blocks as integers of 32 bits, which a step copies as they are, however long the sequence is."""


def blocks_of(blocks: Iterable[BlockId] = ()) -> Blocks:
    """These blocks as integers of 32 bits."""
    return cast("Blocks", array("i", blocks))


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks, and the committed tokens whose keys and values they hold."""

    blocks: list[Blocks]
    """For each table of the layout, by position // block size: the block, or `OUT_OF_WINDOW`."""
    root: bytes
    """The key before the sequence's first block; see `prefix_cache`."""
    tokens: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """The key of each full block of `tokens`; empty without a prefix cache."""
    states: SequenceStates = field(default_factory=_no_states)
    """The states of recurrent layers; empty without any."""

    @property
    def stored_len(self) -> int:
        """Number of committed tokens."""
        return len(self.tokens)

    @property
    def held(self) -> int:
        """Number of blocks in this table, shared ones included."""
        return sum(block != OUT_OF_WINDOW for blocks in self.blocks for block in blocks)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored prefix of a new sequence. Valid until the allocator reserves, commits or frees anything."""

    root: bytes
    tokens: tuple[int, ...] = ()
    blocks: tuple[tuple[BlockId, ...], ...] = ()
    """The blocks of each table, as in `BlockTable.blocks`; an entry may also be `OFFLOADED`."""
    chain: tuple[bytes, ...] = ()
    covered: int = 0
    """Length up to which all blocks are stored. Beyond the prefix there is no state of recurrent layers."""

    def __len__(self) -> int:
        return len(self.tokens)

    def offloaded(self) -> list[tuple[bytes, int, int]]:
        """(key, table, index in the table) of each block that is not in the pool."""
        return [
            (block_key(self.chain[index], table), table, index)
            for table, blocks in enumerate(self.blocks)
            for index, block in enumerate(blocks)
            if block == OFFLOADED
        ]


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A search for the stored prefix of a new sequence."""

    root: bytes
    tokens: Sequence[int]
    max_tokens: int
    """Longest prefix of `tokens` to look for."""
    parent: BlockTable | None = None
    """A sequence whose blocks may be shared, including its last, partly filled one."""
    chain: list[bytes] = field(default_factory=list)
    """Keys of the full blocks of `tokens` that a search has computed; the next search reuses them."""


class PrefixSearch:
    """Finds the longest prefix whose blocks are in the parent's table, in the prefix cache or offloaded.

    A group with full attention needs every block. A group with a window needs the blocks that the next token sees.
    """

    def __init__(
        self,
        layout: KvLayout,
        index: PrefixIndex | None,
        is_offloaded: Callable[[bytes], bool] | None,
        has_state: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`has_state(key)` says whether recurrent layers have a state after a full block; `None`: they need none."""
        self._size = layout.block_size
        self._groups: list[KvGroup] = [group for group in layout.groups for _ in range(group.tables)]
        self._index = index
        self._is_offloaded = is_offloaded
        self._has_state = has_state

    def longest(self, query: PrefixQuery) -> Prefix:
        """The longest stored prefix, of at most `query.max_tokens` tokens."""
        size = self._size
        parent = query.parent if query.parent is not None and query.parent.root == query.root else None
        shared_len = 0 if parent is None else _common_prefix_len(parent.tokens, query.tokens, query.max_tokens)
        chain = query.chain
        if parent is not None:
            chain.extend(parent.chain[len(chain) : shared_len // size])
        sources: list[list[BlockId]] = [[] for _ in self._groups]
        runs = [0] * len(self._groups)  # per table: how many consecutive blocks up to here are stored
        best, covered = 0, 0
        partial: list[BlockId] = []  # per table: the parent's last, partly filled block
        for index in range(-(-query.max_tokens // size)):
            if parent is not None and shared_len % size and index == shared_len // size:
                ends = [blocks[index] for blocks in parent.blocks]
                if self._covers(
                    shared_len, [run + 1 if end != OUT_OF_WINDOW else 0 for run, end in zip(runs, ends, strict=True)]
                ):
                    best, partial = shared_len, ends
            length = (index + 1) * size
            if length > query.max_tokens:
                break
            if self._index is not None and index == len(chain):
                before = chain[-1] if chain else query.root
                chain.append(next_key(before, query.tokens[index * size : length]))
            for table, found in enumerate(sources):
                shared = parent.blocks[table][index] if parent is not None and length <= shared_len else OUT_OF_WINDOW
                found.append(shared if shared != OUT_OF_WINDOW else self._cached(chain, index, table))
                runs[table] = runs[table] + 1 if found[-1] != OUT_OF_WINDOW else 0
            if any(
                found[-1] == OUT_OF_WINDOW and self._is_required(table, index) for table, found in enumerate(sources)
            ):
                break
            if self._covers(length, runs):
                covered = length
                best = length if self._has_state is None or self._has_state(chain[index]) else best
        if best % size:
            for found, end in zip(sources, partial, strict=True):
                found[best // size :] = [end]
        return replace(self._prefix(query, best, sources, chain), covered=max(best, covered))

    def _cached(self, chain: Sequence[bytes], index: int, table: int) -> BlockId:
        if self._index is None:
            return OUT_OF_WINDOW
        key = block_key(chain[index], table)
        block = self._index.find(key)
        if block is not None:
            return block
        return OFFLOADED if self._is_offloaded is not None and self._is_offloaded(key) else OUT_OF_WINDOW

    def _is_required(self, table: int, index: int) -> bool:
        """Whether every longer prefix needs this block."""
        group = self._groups[table]
        return group.window is None or index < -(-group.sinks // self._size)

    def _covers(self, length: int, runs: Sequence[int]) -> bool:
        """Whether the consecutive blocks that end at `length` reach back as far as each group sees."""
        block_count = -(-length // self._size)
        return all(
            run >= block_count - group.first_needed(length) // self._size
            for group, run in zip(self._groups, runs, strict=True)
        )

    def _prefix(
        self, query: PrefixQuery, length: int, sources: Sequence[Sequence[BlockId]], chain: Sequence[bytes]
    ) -> Prefix:
        """The prefix of `length` tokens, with exactly the blocks that a sequence of this length holds."""
        size = self._size
        blocks: list[tuple[BlockId, ...]] = []
        for group, found in zip(self._groups, sources, strict=True):
            first = group.first_needed(length) // size
            sinks = min(first, -(-group.sinks // size))
            blocks.append((*found[:sinks], *[OUT_OF_WINDOW] * (first - sinks), *found[first : -(-length // size)]))
        return Prefix(query.root, tuple(query.tokens[:length]), tuple(blocks), tuple(chain[: length // size]))


def _common_prefix_len(stored: Sequence[int], tokens: Sequence[int], most: int) -> int:
    """Number of leading tokens that are equal, at most `most`."""
    most = min(len(stored), most)
    if stored[:most] == list(tokens[:most]):
        return most
    return next(index for index in range(most) if stored[index] != tokens[index])
