"""What drafting methods without a model share: they draft for one sequence after another, and learn what was taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Evidence, Proposal, RowFault
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT
from workers.draft.common.sessions import Session, Sessions
from workers.draft.lookup.continuation_tree import ContinuationTree
from workers.draft.lookup.reliability import Reliability
from workers.sampling.context import GREEDY_BELOW

SessionType = TypeVar("SessionType", bound=Session)


class SequenceDrafter(ABC, Generic[SessionType]):
    """Drafts for one row after another. It is a `DraftMethod`."""

    def __init__(
        self,
        create: Callable[[SequenceStart], SessionType],
        draft: DraftSection,
        discard: Callable[[SessionType], None] = lambda _: None,
    ) -> None:
        """`create` makes the session of a sequence; `discard` receives it when the sequence is released."""
        self._max_nodes = draft.max_nodes
        self._max_depth = draft.max_depth
        self._sessions = Sessions(create, discard)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """See `DraftMethod`."""
        return tuple(self._propose(row) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `DraftMethod`."""
        self._sessions.release(sequence_ids)

    def _propose(self, row: DraftRow) -> Proposal:
        session = self._sessions.apply(row)
        if isinstance(session, RowFault):
            return Proposal(row.sequence_id, row.base_len, fault=session)
        return self._proposal(session, row)

    def _within(self, budget: DraftBudget) -> DraftBudget:
        """The budget within the configured one. Its depth is 0 where nothing can be drafted."""
        nodes = max(0, min(budget.max_nodes, self._max_nodes))
        return DraftBudget(nodes, max(0, min(budget.max_depth, self._max_depth, nodes)))

    @abstractmethod
    def _proposal(self, session: SessionType, row: DraftRow) -> Proposal:
        """The draft after the tokens of the session, to which those of the row have been added."""


class DraftedSession(Session):
    """Committed tokens, and the last draft after them."""

    __slots__ = ("_draft",)

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self._draft: tuple[int, DraftBudget, ContinuationTree] | None = None
        """Committed length, budget and tree of the last proposal."""

    @property
    def is_greedy(self) -> bool:
        """Whether the target decodes greedily."""
        return self.start.sampling.temperature < GREEDY_BELOW

    def last_draft(self, budget: DraftBudget) -> ContinuationTree | None:
        """The last draft, if it has this budget and no tokens were committed since."""
        if self._draft is not None and self._draft[:2] == (len(self.tokens), budget):
            return self._draft[2]
        return None

    def set_draft(self, budget: DraftBudget, drafted: ContinuationTree) -> None:
        """Store the draft after the present tokens."""
        self._draft = len(self.tokens), budget, drafted

    def observe(self, reliability: Reliability) -> None:
        """Record which drafted tokens the target took since the last draft, once."""
        if self._draft is None or len(self.tokens) <= self._draft[0]:
            return
        length, _, drafted = self._draft
        self._draft = None
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(drafted.tree.parents):
            children.setdefault(parent, []).append(node)
        node = ROOT
        for token in self.tokens[length:]:
            taken = None
            for child in children.get(node, ()):
                hit = drafted.tree.tokens[child] == token
                reliability.observe(drafted.conditionals[child], hit)
                taken = child if hit else taken
            if taken is None:
                return
            node = taken

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """Learn from what the target showed. A method that asks for no evidence learns nothing."""

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """See `Session`. Tokens that stay the same are neither removed nor added again."""
        held = self.tokens[known_len:]
        most = min(len(held), len(new_tokens))
        same = next((index for index in range(most) if held[index] != new_tokens[index]), most)
        if same < len(held):
            self._draft = None
            self.remove(known_len + same)
        self.append(new_tokens[same:])

    def remove(self, length: int) -> None:
        """Remove the tokens from position `length` on."""
        del self.tokens[length:]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.tokens.extend(tokens)


DraftedType = TypeVar("DraftedType", bound=DraftedSession)


class EstimatingDrafter(SequenceDrafter[DraftedType]):
    """Drafts trees with an estimate per node, and corrects estimates by what the target takes.

    Greedy and sampled decoding are corrected separately. A repeated row receives the same draft again.
    """

    def __init__(
        self,
        create: Callable[[SequenceStart], DraftedType],
        draft: DraftSection,
        discard: Callable[[DraftedType], None] = lambda _: None,
    ) -> None:
        super().__init__(create, draft, discard)
        self._reliability = {True: Reliability(), False: Reliability()}

    def _proposal(self, session: DraftedType, row: DraftRow) -> Proposal:
        reliability = self._reliability[session.is_greedy]
        session.observe(reliability)
        session.learn(row.evidence)
        drafted = session.last_draft(row.budget)
        if drafted is None:
            budget = self._within(row.budget)
            drafted = self._draft(session, budget, reliability) if budget.max_depth else ContinuationTree()
            session.set_draft(row.budget, drafted)
        return Proposal(
            row.sequence_id,
            row.base_len,
            drafted.tree,
            probabilities=drafted.probabilities,
            is_prunable=drafted.is_prunable,
        )

    @abstractmethod
    def _draft(self, session: DraftedType, budget: DraftBudget, reliability: Reliability) -> ContinuationTree:
        """Draft within a budget of at least one node."""
