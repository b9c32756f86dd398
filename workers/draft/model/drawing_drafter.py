"""A drafter that draws its tokens at random and states their distributions, for rules that read them.

The shape of its trees is fixed: `siblings` tokens below the last committed token and below each first sibling, down to
the bounds of the budget and as far as there is memory. The shape does not depend on the drawn tokens. Proposals have no
`probabilities`, by which the coordinator would leave out improbable tokens. This keeps the rules `rejection` and
`block` exact. Every tree is drawn with new random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.core.config.draft_section import DraftSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftDistribution, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT, TokenTree
from workers.draft.common.sessions import DraftingSession, Sessions, has_room
from workers.draft.common.trees.expander import ExpansionRow
from workers.draft.model.token_drawer import DrawnSiblings, TokenDrawer
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool

MOST_FORWARD_TOKENS = 512
"""Most tokens in one forward pass. A long prompt goes in chunks."""
_BACKGROUND_TOKENS = 64
"""Most committed tokens in one pass between calls, so that the next call does not wait long."""


class DrawingSession(DraftingSession):
    """Committed tokens, and the table that stores the keys and values of most of them."""

    __slots__ = ("table",)

    def __init__(self, start: SequenceStart, table: BlockTable) -> None:
        super().__init__(start)
        self.table = table

    def unstored(self) -> tuple[int, ...]:
        """Committed tokens that must go through the model; the last one always must."""
        return tuple(self.tokens[self.table.stored_len :])

    def keep_common(self, memory: KvPool) -> None:
        """Keep what the table stores of the committed tokens, except the last: its logits are needed."""
        stored, limit = self.table.tokens, min(self.table.stored_len, len(self.tokens) - 1)
        common = next((index for index in range(limit) if stored[index] != self.tokens[index]), limit)
        memory.truncate(self.table, common)


@dataclass(eq=False)
class _Draft:
    """A tree under construction: a trunk of first siblings."""

    session: DrawingSession
    max_nodes: int
    max_depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    trunk: int = ROOT
    """The deepest first sibling."""
    depth: int = 0
    is_done: bool = False

    def next_tokens(self) -> tuple[int, ...]:
        """The tokens to send through the model next; none once the tree is complete."""
        if self.is_done or self.depth >= self.max_depth or len(self.tokens) >= self.max_nodes:
            return ()
        return self.session.unstored() if self.trunk == ROOT else (self.tokens[self.trunk],)

    def add(self, siblings: DrawnSiblings) -> None:
        """Add the tokens drawn below the trunk."""
        tokens = siblings.tokens[: self.max_nodes - len(self.tokens)]
        self.is_done = not tokens
        if self.is_done:
            return
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [self.trunk] * len(tokens)
        if siblings.distribution is not None:
            self.distributions += [siblings.distribution] * len(tokens)
        self.trunk, self.depth = first, self.depth + 1

    def proposal(self, row: DraftRow) -> Proposal:
        tree = TokenTree(tuple(self.tokens), tuple(self.parents))
        origins = (DraftOrigin.TRAINED,) * len(tree)
        return Proposal(row.sequence_id, row.base_len, tree, distributions=tuple(self.distributions), origins=origins)


class DrawingDrafter:
    """Draws `siblings` tokens at each depth. It is a `DraftMethod` with `IdleWork`."""

    def __init__(
        self,
        drawer: TokenDrawer,
        draft: DraftSection,
        siblings: int,
        most_forward_tokens: int = MOST_FORWARD_TOKENS,
    ) -> None:
        self._drawer = drawer
        self._memory = drawer.memory
        self._draft = draft
        self._siblings = siblings
        self._most_forward_tokens = most_forward_tokens
        self._sessions = Sessions(
            lambda start: DrawingSession(start, self._memory.new_table()),
            lambda session: self._memory.release(session.table),
            drawer.vocabulary_size,
        )

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        drafts: dict[SequenceId, _Draft] = {}
        proposals: dict[SequenceId, Proposal] = {}
        for row, session in self._sessions.update(rows, proposals):
            session.keep_common(self._memory)
            room = self._drawer.max_context_len - len(session.tokens) + 1
            depth = max(0, min(row.budget.max_depth, self._draft.max_depth, room))
            drafts[row.sequence_id] = _Draft(session, min(row.budget.max_nodes, self._draft.max_nodes), depth)
        self._grow(list(drafts.values()), drafts.keys())
        return tuple(
            drafts[row.sequence_id].proposal(row) if row.sequence_id in drafts else proposals[row.sequence_id]
            for row in rows
        )

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._sessions.release(sequence_ids)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Compute some committed tokens of these sequences. Returns false when none are left or there is no room."""
        for session in self._sessions.known(sequence_ids):
            unstored = session.unstored()[:-1] if len(session.tokens) <= self._drawer.max_context_len else ()
            if unstored:
                piece = unstored[:_BACKGROUND_TOKENS]
                if not self._reserve(session.table, len(piece), iter(())):
                    return False
                self._drawer.draw([ExpansionRow(session.table, piece, session.start, is_last=False)], 1)
                return True
        return False

    def run_ahead(self) -> bool:
        """Return false: nothing is drawn ahead, because each round has random numbers of its own."""
        return False

    def _grow(self, drafts: Sequence[_Draft], in_use: Collection[SequenceId]) -> None:
        """Run passes until all trees are complete."""
        evictable = (session for session in self._sessions.least_recent(without=in_use) if session.table.stored_len)
        while True:
            room = self._most_forward_tokens
            passing: list[tuple[_Draft, ExpansionRow]] = []
            for draft in sorted(drafts, key=lambda draft: len(draft.next_tokens())):  # long prompts take what is left
                tokens = draft.next_tokens()
                piece = tokens[:room]
                if not piece:
                    continue
                if not self._reserve(draft.session.table, len(piece), evictable):
                    draft.is_done = True
                    continue
                is_last = len(piece) == len(tokens)
                row = ExpansionRow(draft.session.table, piece, draft.session.start, is_last, draft.depth + 1)
                passing.append((draft, row))
                room -= len(piece)
            if not passing:
                return
            found = self._drawer.draw([row for _, row in passing], self._siblings)
            for (draft, row), siblings in zip(passing, found, strict=True):
                if row.is_last:
                    draft.add(siblings)

    def _reserve(self, table: BlockTable, count: int, evictable: Iterator[DrawingSession]) -> bool:
        """Make room for `count` more tokens, evicting sessions if need be. Returns whether there is room."""
        return has_room(
            lambda: self._memory.reserve(table, table.stored_len + count),
            evictable,
            lambda session: self._memory.truncate(session.table, 0),
        )
