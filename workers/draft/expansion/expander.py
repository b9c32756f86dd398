"""What grows trees, as they see it: a model that guesses what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.request import SequenceStart
from workers.draft.expansion.draft_tree import Guess, Memory
from workers.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class Place:
    """Tokens of one sequence that go through the model: they follow those in `table`, which has room for them."""

    table: BlockTable
    tokens: tuple[int, ...]
    start: SequenceStart
    is_last: bool = True
    """Whether guesses are wanted after them."""
    depth: int = 1
    """How far below the last committed token those are."""


class Expander(Protocol):
    """Guesses, and remembers in the tables of its memory what it was given."""

    @property
    def memory(self) -> Memory:
        """Where it stores."""
        ...

    @property
    def max_context_len(self) -> int:
        """Most tokens after which it can guess."""
        ...

    @property
    def vocabulary_size(self) -> int | None:
        """Tokens are below this; `None` where any will do."""
        ...

    def expand(self, places: Sequence[Place]) -> list[tuple[Guess, ...]]:
        """One forward pass: commits each place's tokens to its table, and guesses, likeliest first.

        One entry per place, in order; empty where no guess is wanted or none can be made. No two places share a table.
        """
        ...
