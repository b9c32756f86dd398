"""The drafts of sequences whose candidates at all depths are ranked at once: what each had last, and the next trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.config.draft_section import DraftSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.request import SequenceStart
from workers.draft.common.modules.ranked_paths import PathCalibration, RankedPaths, TreeForm, draft_paths
from workers.draft.common.sessions import Session
from workers.draft.common.trees.calibration import KINDS
from workers.sampling.context import Branch, DecisionContext

_NOT_DRAFTED = -1
"""Placeholder for the tokens between the committed ones and a depth, which are not known. Penalties ignore it."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The candidates after `base_len` tokens, and the last proposal from them."""

    base_len: int
    start: SequenceStart
    ranked: RankedPaths
    budget: DraftBudget
    proposal: Proposal


@dataclass(slots=True)
class PathHistory:
    """What one sequence was drafted last."""

    last: _Drafted | None = None
    """The last draft; `None` once its tokens were learned from, or when they no longer follow the committed ones."""
    is_streak: bool = True
    """Whether the last committed token was a first candidate."""


class PathTrees:
    """Builds the trees of all sequences of a drafter, and learns from the tokens that were committed after them."""

    def __init__(self, draft: DraftSection, depths: int, form: TreeForm) -> None:
        """`depths` is the number that the module predicts."""
        self._max_nodes = draft.max_nodes
        self._max_depth = min(draft.max_depth, depths)
        self._nodes = form.nodes
        self._calibration = PathCalibration(depths)

    def within(self, budget: DraftBudget) -> DraftBudget:
        """The part of a row's budget that a tree can have."""
        return budget.within(self._max_nodes, self._max_depth)

    def observe(self, session: Session, history: PathHistory) -> None:
        """Learn from the tokens that were committed since the last draft, once."""
        last = history.last
        if last is not None and len(session.tokens) > last.base_len:
            history.last = None
            taken, kind = session.tokens[last.base_len :], KINDS[session.is_greedy, history.is_streak]
            history.is_streak = self._calibration.observe(last.ranked, taken, kind)

    def repeated(self, session: Session, history: PathHistory, budget: DraftBudget) -> Proposal | None:
        """The last proposal, if it is the answer to this budget too."""
        last = history.last
        return last.proposal if last is not None and (last.budget, last.start) == (budget, session.start) else None

    def propose(
        self, row: DraftRow, budget: DraftBudget, session: Session, history: PathHistory, ranked: RankedPaths
    ) -> Proposal:
        """The tree of the most probable ranked paths within a budget."""
        tree, probabilities = draft_paths(
            ranked,
            budget,
            self._calibration,
            kind=KINDS[session.is_greedy, history.is_streak],
            ends=session.start.sampling.end_token_ids,
            shape=self._nodes,
        )
        origins = (DraftOrigin.TRAINED,) * len(tree)
        proposal = Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities, origins=origins)
        history.last = _Drafted(row.base_len, session.start, ranked, budget, proposal)
        return proposal


def decision_contexts(sessions: Sequence[Session], depths: int) -> list[DecisionContext]:
    """The contexts [sessions x depths] of the decisions at the next `depths` positions of each sequence."""
    return [
        DecisionContext(one.start.sampling, Branch(one.tokens, (_NOT_DRAFTED,) * depth), one.start.prompt_len)
        for one in sessions
        for depth in range(depths)
    ]
