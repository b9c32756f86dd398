"""One sequence's blocks, and the search for those that a new sequence can begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.prefix_cache import PrefixIndex, block_key, next_key

OUT_OF_WINDOW = BlockId(-1)
"""In a table: the block that was here has left the window."""
OFFLOADED = BlockId(-2)
"""In a prefix: the block is not in the pool and can be had from outside of it."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks, and the committed tokens whose keys and values are in them."""

    blocks: list[list[BlockId]]
    """For each of the layout's tables: position ÷ block size → block, or `OUT_OF_WINDOW`."""
    root: bytes
    """Where the sequence's chain of keys begins."""
    tokens: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """One key per full block of `tokens`; empty where nothing is cached."""

    @property
    def stored_len(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def held(self) -> int:
        """Blocks in this table, shared ones included."""
        return sum(block != OUT_OF_WINDOW for blocks in self.blocks for block in blocks)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that is stored already. Valid until anything is reserved, committed or freed."""

    root: bytes
    tokens: tuple[int, ...] = ()
    blocks: tuple[tuple[BlockId, ...], ...] = ()
    """As in `BlockTable`, or `OFFLOADED`."""
    chain: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def elsewhere(self) -> list[tuple[bytes, int, int]]:
        """(key, table, place in it) of the blocks that are not in the pool."""
        return [
            (block_key(self.chain[place], table), table, place)
            for table, blocks in enumerate(self.blocks)
            for place, block in enumerate(blocks)
            if block == OFFLOADED
        ]


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """The beginning that a new sequence would like to find."""

    root: bytes
    tokens: Sequence[int]
    most: int
    """Of `tokens`, no more than these."""
    parent: BlockTable | None = None
    """May share its last, half-filled block too."""
    chain: list[bytes] = field(default_factory=list)
    """Keys of the full blocks of `tokens`, as far as a search has come: the next search need not hash them again."""


class PrefixSearch:
    """Looks for the longest beginning that a table, the cache or `elsewhere` hold; changes nothing.

    A group of full attention needs every block; one with a window needs those that the next token sees.
    """

    def __init__(self, layout: KvLayout, index: PrefixIndex | None, elsewhere: Callable[[bytes], bool] | None) -> None:
        self._size = layout.block_size
        self._groups: list[KvGroup] = [group for group in layout.groups for _ in range(group.tables)]
        self._index = index
        self._elsewhere = elsewhere

    def longest(self, wanted: PrefixQuery) -> Prefix:
        """At most `wanted.most` tokens."""
        size = self._size
        parent = wanted.parent if wanted.parent is not None and wanted.parent.root == wanted.root else None
        alike = 0 if parent is None else _common_prefix_len(parent.tokens, wanted.tokens, wanted.most)
        chain = wanted.chain
        if parent is not None:
            chain.extend(parent.chain[len(chain) : alike // size])
        sources: list[list[BlockId]] = [[] for _ in self._groups]
        runs = [0] * len(self._groups)  # how many blocks in a row, up to here, each table could have
        best = 0
        half: list[BlockId] = []  # of the parent: what comes after the full blocks
        for place in range(-(-wanted.most // size)):
            if parent is not None and alike % size and place == alike // size:
                ends = [blocks[place] for blocks in parent.blocks]
                if self._covers(
                    alike, [run + 1 if end != OUT_OF_WINDOW else 0 for run, end in zip(runs, ends, strict=True)]
                ):
                    best, half = alike, ends
            length = (place + 1) * size
            if length > wanted.most:
                break
            if self._index is not None and place == len(chain):
                before = chain[-1] if chain else wanted.root
                chain.append(next_key(before, wanted.tokens[place * size : length]))
            for table, found in enumerate(sources):
                shared = parent.blocks[table][place] if parent is not None and length <= alike else OUT_OF_WINDOW
                found.append(shared if shared != OUT_OF_WINDOW else self._cached(chain, place, table))
                runs[table] = runs[table] + 1 if found[-1] != OUT_OF_WINDOW else 0
            if any(
                found[-1] == OUT_OF_WINDOW and self._is_required(table, place) for table, found in enumerate(sources)
            ):
                break
            if self._covers(length, runs):
                best = length
        if best % size:
            for found, end in zip(sources, half, strict=True):
                found[best // size :] = [end]
        return self._prefix(wanted, best, sources, chain)

    def _cached(self, chain: Sequence[bytes], place: int, table: int) -> BlockId:
        if self._index is None:
            return OUT_OF_WINDOW
        key = block_key(chain[place], table)
        block = self._index.find(key)
        if block is not None:
            return block
        return OFFLOADED if self._elsewhere is not None and self._elsewhere(key) else OUT_OF_WINDOW

    def _is_required(self, table: int, place: int) -> bool:
        """Whether no longer beginning can do without this block."""
        group = self._groups[table]
        return group.window is None or place < -(-group.sinks // self._size)

    def _covers(self, length: int, runs: Sequence[int]) -> bool:
        """Whether the blocks in a row that end at `length` reach back as far as each group sees."""
        places = -(-length // self._size)
        return all(
            run >= places - group.first_needed(length) // self._size
            for group, run in zip(self._groups, runs, strict=True)
        )

    def _prefix(
        self, wanted: PrefixQuery, length: int, sources: Sequence[Sequence[BlockId]], chain: Sequence[bytes]
    ) -> Prefix:
        """The blocks that a sequence of `length` tokens holds, and no others."""
        size = self._size
        blocks: list[tuple[BlockId, ...]] = []
        for group, found in zip(self._groups, sources, strict=True):
            first = group.first_needed(length) // size
            sinks = min(first, -(-group.sinks // size))
            blocks.append((*found[:sinks], *[OUT_OF_WINDOW] * (first - sinks), *found[first : -(-length // size)]))
        return Prefix(wanted.root, tuple(wanted.tokens[:length]), tuple(blocks), tuple(chain[: length // size]))


def _common_prefix_len(stored: Sequence[int], tokens: Sequence[int], most: int) -> int:
    """How many leading tokens are the same, at most `most`."""
    most = min(len(stored), most)
    if stored[:most] == list(tokens[:most]):
        return most
    return next(index for index in range(most) if stored[index] != tokens[index])
