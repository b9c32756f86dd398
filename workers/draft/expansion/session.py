"""One sequence of a drafter that grows trees: committed tokens, the tree below them, and what is to go through next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.request import SequenceStart
from workers.draft.expansion.calibration import Calibration
from workers.draft.expansion.draft_tree import GrowingTree, Memory, Node
from workers.draft.expansion.expander import Place
from workers.draft.expansion.pass_gain import Pace
from workers.draft.sessions import Session
from workers.draft.suffix_index import SuffixIndex
from workers.kv.block_table import BlockTable
from workers.sampling.context import GREEDY_BELOW

LEAST_CATCH_UP = 16
"""Fewer committed tokens go through with the guesses that are asked for next."""


class GrowingSession(Session):
    """Committed tokens, and the tree that grows below them."""

    __slots__ = (
        "_asked_at",
        "_asked_len",
        "_calibration",
        "_grown_for",
        "_index",
        "_memory",
        "is_asked",
        "tree",
        "version",
    )

    def __init__(
        self, start: SequenceStart, memory: Memory, calibration: Calibration, lookups: range | None, max_depth: int
    ) -> None:
        super().__init__(start)
        self._index = None if lookups is None else SuffixIndex(self.tokens, lookups[0], lookups[-1])
        self._memory = memory
        self._calibration = calibration
        self._grown_for = start
        self._asked_at = float("-inf")
        self._asked_len = 0
        look_up = None if self._index is None else self._index.next_after
        self.tree = GrowingTree(memory, calibration, _is_greedy(start), look_up, max_depth)
        self.is_asked = False
        """Whether the last call wanted guesses: else only committed tokens go through between calls."""
        self.version = 0
        """Grows with whatever makes plans of before void."""

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """See `Session`. What was told before changes nothing; what follows it re-roots the tree."""
        self.version += 1
        overlap = len(self.tokens) - known_len
        told = overlap <= len(new_tokens) and self.tokens[known_len:] == list(new_tokens[:overlap])
        if self.tokens and told and self._has_grown_for(self.start):
            fresh = new_tokens[overlap:]
            self.tokens.extend(fresh)
            self._learn(len(self.tokens) - len(fresh))
            self.tree.commit(fresh)
        else:
            if self._index is not None:
                self._index.cut(known_len)
            super().replace(known_len, new_tokens)
            self._learn(known_len)
            self._grown_for = self.start
            self.tree.restart(self.tokens, _is_greedy(self.start))

    def _learn(self, length: int) -> None:
        """The committed tokens from `length` on are new."""
        if self._index is not None:
            self._index.extend(length)

    def forget(self) -> None:
        """Free all that is stored; the committed tokens stay."""
        self.version += 1
        self.tree.forget()

    def note_asked(self, now: float, pace: Pace) -> None:
        """A call names this sequence at `now`, in seconds."""
        if len(self.tokens) > self._asked_len > 0:
            pace.note_commit(len(self.tokens) - self._asked_len, now - self._asked_at)
        self._asked_at, self._asked_len = now, len(self.tokens)

    def pending(self) -> list[int]:
        """Committed tokens that are to go through: until the root is expanded, its own is the last of them."""
        tree = self.tree
        return [] if tree.root.branch is not None else self.tokens[tree.trunk.stored_len :]

    def behind(self, max_context_len: int) -> tuple[int, ...]:
        """Committed tokens that should not be left to the next call, which also wants guesses."""
        pending = self.pending()[:-1] if self.tree.root.length <= max_context_len else ()
        return tuple(pending) if len(pending) >= LEAST_CATCH_UP else ()

    def _has_grown_for(self, start: SequenceStart) -> bool:
        """Whether the guesses were made with these parameters."""
        return self._grown_for is start or self._grown_for == start


@dataclass(frozen=True, slots=True)
class Pick:
    """A node that is to be expanded, with the tokens that go through for it."""

    session: GrowingSession
    node: Node
    tokens: tuple[int, ...]
    is_last: bool = True
    """False while committed tokens are left that must go through first: there are no guesses yet."""

    def place(self, table: BlockTable) -> Place:
        """What goes through the model, where `table` has room for it."""
        depth = self.node.length - self.session.tree.root.length + 1
        return Place(table, self.tokens, self.session.start, self.is_last, depth)


def _is_greedy(start: SequenceStart) -> bool:
    return start.sampling.temperature < GREEDY_BELOW
