"""One sequence of a drafter that expands trees: its committed tokens and its draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.request import SequenceStart
from workers.draft.common.sessions import Session
from workers.draft.common.suffix_index import SuffixIndex
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.draft_node import DraftNode
from workers.draft.common.trees.draft_tree import DraftTree
from workers.draft.common.trees.expander import BranchMemory, ExpansionRow, OpenSource
from workers.draft.common.trees.pass_cost import CommitTimes
from workers.kv.block_table import BlockTable

LEAST_CATCH_UP = 16
"""Fewer unstored committed tokens than this get no pass of their own; the next call's first pass stores them."""


class TreeSession(Session):
    """Committed tokens and the draft tree below them."""

    __slots__ = (
        "_drafted_for",
        "_index",
        "commit_times",
        "source",
        "tree",
        "version",
        "wants_drafts",
        "weights",
    )

    def __init__(
        self,
        start: SequenceStart,
        memory: BranchMemory,
        calibration: Calibration,
        lookup_sizes: range | None,
        max_depth: int,
    ) -> None:
        super().__init__(start)
        self._index = None if lookup_sizes is None else SuffixIndex(self.tokens, lookup_sizes[0], lookup_sizes[-1])
        self._drafted_for = start
        self.commit_times = CommitTimes()
        look_up = None if self._index is None else self._index.next_after
        self.tree = DraftTree(memory, calibration, self.is_greedy, look_up, max_depth)
        self.source: OpenSource | None = None
        """What the model's encoder says of the source; `None` without one, and while nothing is stored."""
        self.wants_drafts = False
        """Whether the last call had a budget; without one, only committed tokens go through between calls."""
        self.version = 0
        """Incremented by every change that invalidates planned expansions."""
        self.weights = 0
        """Number of the weights that its keys and values were computed with; see `PassOfSalt.version`."""

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """Replace all tokens after the first `known_len` by `new_tokens`.

        Known tokens change nothing; tokens after them move the tree's root.
        """
        self.version += 1
        overlap = len(self.tokens) - known_len
        is_known = overlap <= len(new_tokens) and self.tokens[known_len:] == list(new_tokens[:overlap])
        if self.tokens and is_known and self._is_drafted_for(self.start):
            appended = new_tokens[overlap:]
            self.tokens.extend(appended)
            self._index_from(len(self.tokens) - len(appended))
            self.tree.commit(appended)
        else:
            if self._index is not None:
                self._index.cut(known_len)
            super().replace(known_len, new_tokens)
            self._index_from(known_len)
            if self._drafted_for.source != self.start.source:
                self.evict()
            self._drafted_for = self.start
            self.tree.restart(self.tokens, self.is_greedy)

    def evict(self) -> None:
        """Free all stored keys and values; the committed tokens stay."""
        self.version += 1
        self.tree.evict()
        if self.source is not None:
            self.source.close()
            self.source = None

    def unstored_tokens(self) -> list[int]:
        """Committed tokens that must go through the model, the root's last; empty once the root is expanded."""
        tree = self.tree
        return [] if tree.root.table is not None else self.tokens[tree.root_table.stored_len :]

    def catch_up_tokens(self, max_context_len: int) -> tuple[int, ...]:
        """Unstored committed tokens before the root's, if there are enough of them for a pass of their own."""
        unstored = self.unstored_tokens()[:-1] if self.tree.root.length <= max_context_len else ()
        return tuple(unstored) if len(unstored) >= LEAST_CATCH_UP else ()

    def _index_from(self, length: int) -> None:
        """Add the committed tokens from position `length` on to the index."""
        if self._index is not None:
            self._index.extend(length)

    def _is_drafted_for(self, start: SequenceStart) -> bool:
        """Whether the tree was drafted with these sampling parameters."""
        return self._drafted_for is start or self._drafted_for == start


@dataclass(frozen=True, slots=True)
class NodeExpansion:
    """A node to expand, with the tokens that go through the model for it."""

    session: TreeSession
    node: DraftNode
    tokens: tuple[int, ...]
    is_last: bool = True
    """False while further committed tokens must go through first; then no candidates are drafted."""

    def row(self, table: BlockTable) -> ExpansionRow:
        """The row of the forward pass. `table` has room for the tokens."""
        session, before = self.session, self.node.length - self.session.tree.root.length
        known = session.tree.next_tokens
        return ExpansionRow(table, self.tokens, session.start, self.is_last, before + 1, session.source, known)
