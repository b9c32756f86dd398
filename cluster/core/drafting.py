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
    """The largest draft tree for one row."""

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
    """A request for a draft after `base_len` committed tokens, with the tokens committed since the last one.

    The drafter must hold at least `known_len` tokens of this sequence. `new_tokens` replaces what it holds beyond them,
    so a repeated or late message changes nothing.
    """

    sequence_id: SequenceId
    base_len: int
    new_tokens: tuple[int, ...]
    budget: DraftBudget
    start: SequenceStart | None = None
    """Set if `new_tokens` is the whole sequence."""

    @property
    def known_len(self) -> int:
        """Tokens that the drafter must already hold."""
        return self.base_len - len(self.new_tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft tree after `base_len` committed tokens, or the fault that prevented it."""

    sequence_id: SequenceId
    base_len: int
    tree: TokenTree = EMPTY_TREE
    fault: RowFault | None = None
    probabilities: tuple[float, ...] = ()
    """Estimated probability, per node, that all tokens down to the node are accepted. It never exceeds the parent's.
    Empty if the drafter has no estimate."""
    ready: int = 0
    """Number of nodes that the drafter had computed before the request arrived."""
