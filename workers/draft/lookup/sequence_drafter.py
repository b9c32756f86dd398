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
from workers.draft.common.sessions import DraftingSession, Session, Sessions
from workers.draft.lookup.continuation_tree import ContinuationTree

SessionType = TypeVar("SessionType", bound=Session)


_BINS = 16
_PRIOR_WEIGHT = 8.0
"""Weight of the estimate itself, in observations."""
_DECAY = 0.995
"""Factor by which each observation reduces the weight of earlier ones in its bin."""


class Reliability:
    """Acceptance rates by estimated probability, in `_BINS` bins. Before any observation the estimate is the rate."""

    __slots__ = ("_hits", "_trials")

    def __init__(self) -> None:
        self._hits = [0.0] * _BINS
        self._trials = [0.0] * _BINS

    def probability(self, estimate: float) -> float:
        """The probability that the target takes a token with this estimate, both in [0, 1]."""
        index = min(int(estimate * _BINS), _BINS - 1)
        return (_PRIOR_WEIGHT * estimate + self._hits[index]) / (_PRIOR_WEIGHT + self._trials[index])

    def observe(self, estimate: float, hit: bool) -> None:
        """Record whether the target took a token with this estimate."""
        index = min(int(estimate * _BINS), _BINS - 1)
        self._hits[index] = self._hits[index] * _DECAY + hit
        self._trials[index] = self._trials[index] * _DECAY + 1.0


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
        """Propose a tree for each row, in order."""
        return tuple(self._propose(row) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for these sequences. Unknown ones are no error."""
        self._sessions.release(sequence_ids)

    def _propose(self, row: DraftRow) -> Proposal:
        session = self._sessions.apply(row)
        if isinstance(session, RowFault):
            return Proposal(row.sequence_id, row.base_len, fault=session)
        return self._proposal(session, row)

    def _within(self, budget: DraftBudget) -> DraftBudget:
        """The budget within the configured one. Its depth is 0 where nothing can be drafted."""
        return budget.within(self._max_nodes, self._max_depth)

    @abstractmethod
    def _proposal(self, session: SessionType, row: DraftRow) -> Proposal:
        """The draft after the tokens of the session, to which those of the row have been added."""


class DraftedSession(DraftingSession):
    """Committed tokens, and the last draft after them."""

    __slots__ = ("_draft",)

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self._draft: tuple[int, DraftBudget, ContinuationTree] | None = None
        """Committed length, budget and tree of the last proposal."""

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
                if drafted.conditionals[child] < 1.0:  # a certain token, which a grammar forces, teaches nothing
                    reliability.observe(drafted.conditionals[child], hit)
                taken = child if hit else taken
            if taken is None:
                return
            node = taken

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """Learn from what the target showed. A method that asks for no evidence learns nothing."""

    def forget_draft(self) -> None:
        """Drop the last draft."""
        self._draft = None


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
            origins=drafted.origins,
        )

    @abstractmethod
    def _draft(self, session: DraftedType, budget: DraftBudget, reliability: Reliability) -> ContinuationTree:
        """Draft within a budget of at least one node."""
