"""Messages between coordinator and drafters: rows to draft for, budgets, proposals.

Lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.sequence import Sequence
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import RowFault


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How large a tree may grow for one row."""

    max_nodes: int
    max_depth: int


NO_DRAFT = DraftBudget(0, 0)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence to draft for, and how large its tree may be. An empty budget only brings the drafter up to date."""

    sequence: Sequence
    budget: DraftBudget


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Ask for guesses after `base_len` committed tokens; what was committed since rides along.

    The drafter must know at least `base_len - len(new_tokens)` tokens of this sequence; whatever it
    holds beyond is replaced by `new_tokens`, so a repeated or overtaken message does no harm.
    """

    sequence_id: SequenceId
    base_len: int
    new_tokens: tuple[int, ...]
    budget: DraftBudget
    start: SequenceStart | None = None
    """Present when `new_tokens` is the whole sequence."""

    @property
    def known_len(self) -> int:
        return self.base_len - len(self.new_tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree stamped with the committed length it grew from, or the reason for its absence."""

    sequence_id: SequenceId
    base_len: int
    tree: TokenTree = EMPTY_TREE
    fault: RowFault | None = None
    probabilities: tuple[float, ...] = ()
    """One per node: how likely it is that the committed text passes through it, as the drafter estimates; never more
    than its parent's. Empty where the drafter cannot tell."""
    ready: int = 0
    """How many of the nodes had been grown before they were asked for."""
