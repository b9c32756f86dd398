"""The interfaces that tree expansion uses: a model that drafts tokens, and the memory for keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cluster.core.drafting import ANY_TOKENS, NextTokens
from cluster.core.ports import SourceStates
from cluster.core.request import SequenceStart
from workers.kv.block_table import BlockTable

DraftedToken = tuple[int, float]
"""A token and the draft model's probability of it."""


class BranchMemory(Protocol):
    """The memory for the keys and values of branches: a `KvPool`, or a `BlockAllocator` alone."""

    @property
    def blocks_total(self) -> int:
        """Number of blocks."""

    @property
    def blocks_free(self) -> int:
        """Number of blocks that belong to no table."""

    def new_table(self) -> BlockTable:
        """Create an empty table."""

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """Create a table that begins with the first `length` stored tokens of `table`; it takes no block yet."""

    def reserve(self, table: BlockTable, length: int) -> object:
        """Make room for `length` tokens. Raises `KvPoolExhausted`, having changed nothing."""

    def truncate(self, table: BlockTable, length: int) -> None:
        """Free the blocks beyond `length` tokens."""

    def release(self, table: BlockTable) -> None:
        """Free all blocks of the table."""


class OpenSource(Protocol):
    """What an encoder says of a sequence's source, stored as long as the sequence holds keys and values."""

    def close(self) -> None:
        """Free it, unless another sequence reads the same source."""


@dataclass(frozen=True, slots=True)
class ExpansionRow:
    """Tokens of one sequence that go through the model. They follow those in `table`, which has room for them."""

    table: BlockTable
    tokens: tuple[int, ...]
    start: SequenceStart
    is_last: bool = True
    """Whether the model drafts candidates after these tokens."""
    depth: int = 1
    """Depth of the drafted tokens below the last committed token; 1 follows it directly."""
    source: OpenSource | None = None
    """The source of an encoder-decoder model."""
    next_tokens: NextTokens = ANY_TOKENS
    """What the sequence's grammar says of the tokens after the last committed one."""


class Expander(Protocol):
    """Drafts tokens, and stores the tokens that it reads in the tables of its memory."""

    @property
    def memory(self) -> BranchMemory:
        """The memory that holds the tables."""

    @property
    def max_context_len(self) -> int:
        """Largest number of tokens after which the model can draft another."""

    @property
    def vocabulary_size(self) -> int | None:
        """All tokens are below this value; `None` where any token is valid."""

    def expand(self, rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        """Run one forward pass: commit each row's tokens to its table and draft the tokens that may follow.

        Returns one entry per row, in order, the most probable token first. An entry is empty where `is_last` is false
        or nothing can be drafted. No two rows share a table.
        """


@runtime_checkable
class ReadsSources(Protocol):
    """An expander whose model may have an encoder."""

    def open_source(self, start: SequenceStart) -> OpenSource | None:
        """Make room for the source of a sequence; `None` if it has none. Raises `KvPoolExhausted`."""

    def read_sources_from(self, states: SourceStates) -> None:
        """Use the output of the target's encoder instead of reading sources, if the model's encoder is the same."""
