"""Methods whose candidates at all depths are ranked at once: what each sequence was drafted last, and its next tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cluster.core.config.draft_section import DraftSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, NextTokens, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.common.modules.pass_of_salt import PassOfSalt, ValueOfSalt
from workers.draft.common.modules.ranked_paths import PathCalibration, RankedPaths, TreeForm, draft_paths
from workers.draft.common.sessions import Sessions
from workers.draft.common.trees.calibration import KINDS
from workers.sampling.allowed_tokens import allowed_at
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


class PathSession(Protocol):
    """A sequence of such a method: a `Session` with what it was drafted last."""

    history: PathHistory
    start: SequenceStart
    tokens: list[int]
    next_tokens: NextTokens

    @property
    def is_greedy(self) -> bool:
        """Whether the target decodes this sequence greedily."""


class PathTrees:
    """Builds the trees of all sequences of a drafter, and learns from the tokens that were committed after them."""

    def __init__(self, draft: DraftSection, depths: int, form: TreeForm, passes: PassOfSalt[Any] | None = None) -> None:
        """`depths` is the number that the module predicts. Trees of each of `passes` are learned from apart."""
        self._max_nodes = draft.max_nodes
        self._max_depth = min(draft.max_depth, depths)
        self._nodes = form.nodes
        self._calibrations = ValueOfSalt(passes or PassOfSalt(self), lambda: PathCalibration(depths))

    def within(self, budget: DraftBudget) -> DraftBudget:
        """The part of a row's budget that a tree can have."""
        return budget.within(self._max_nodes, self._max_depth)

    def observe(self, session: PathSession) -> None:
        """Learn from the tokens that were committed since the last draft, once."""
        history = session.history
        last = history.last
        if last is not None and len(session.tokens) > last.base_len:
            history.last = None
            taken, kind = session.tokens[last.base_len :], KINDS[session.is_greedy, history.is_streak]
            calibration = self._calibrations.of_salt(session.start.cache_salt)
            history.is_streak = calibration.observe(last.ranked, taken, kind)

    def repeated(self, session: PathSession, budget: DraftBudget) -> Proposal | None:
        """The last proposal, if it is the answer to this budget too."""
        last = session.history.last
        return last.proposal if last is not None and (last.budget, last.start) == (budget, session.start) else None

    def propose(self, row: DraftRow, budget: DraftBudget, session: PathSession, ranked: RankedPaths) -> Proposal:
        """The tree of the most probable ranked paths within a budget."""
        tree, probabilities = draft_paths(
            ranked,
            budget,
            self._calibrations.of_salt(session.start.cache_salt),
            kind=KINDS[session.is_greedy, session.history.is_streak],
            ends=session.start.sampling.end_token_ids,
            shape=self._nodes,
        )
        origins = (DraftOrigin.TRAINED,) * len(tree)
        proposal = Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities, origins=origins)
        session.history.last = _Drafted(row.base_len, session.start, ranked, budget, proposal)
        return proposal


SessionType = TypeVar("SessionType", bound=PathSession)


class Wanted(NamedTuple, Generic[SessionType]):
    """A row that gets a new tree of at most this size."""

    row: DraftRow
    budget: DraftBudget
    session: SessionType


class PathDrafter(ABC, Generic[SessionType]):
    """Drafts trees of ranked paths, the rows of a call together. It is a `DraftMethod`."""

    _sessions: Sessions[Any]

    def __init__(self, trees: PathTrees) -> None:
        self._trees = trees

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for these sequences. Unknown ones are no error."""
        self._sessions.release(sequence_ids)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Propose a tree for each row, in order."""
        proposals = {row.sequence_id: Proposal(row.sequence_id, row.base_len) for row in rows}
        wanted: list[Wanted[SessionType]] = []
        for row, session in self._update(rows, proposals):
            self._trees.observe(session)
            budget = self._budget(row, session)
            repeated = self._trees.repeated(session, budget)
            if repeated is not None:
                proposals[row.sequence_id] = repeated
            elif budget.max_depth and self._is_ready(session):
                wanted.append(Wanted(row, budget, session))
        if wanted:
            self._draft(wanted, proposals)
        return tuple(proposals[row.sequence_id] for row in rows)

    @abstractmethod
    def _update(
        self, rows: Sequence[DraftRow], proposals: dict[SequenceId, Proposal]
    ) -> Iterable[tuple[DraftRow, SessionType]]:
        """Commit the rows' tokens and evidence. Yields the rows that fit; `proposals` gets the others' faults."""

    @abstractmethod
    def _draft(self, wanted: Sequence[Wanted[SessionType]], proposals: dict[SequenceId, Proposal]) -> None:
        """Rank the candidates of all rows, and give each its tree with `_build`."""

    def _budget(self, row: DraftRow, session: SessionType) -> DraftBudget:  # noqa: ARG002 - a method may read it
        """The largest tree of a row."""
        return self._trees.within(row.budget)

    def _is_ready(self, session: SessionType) -> bool:  # noqa: ARG002
        """Whether what a draft needs is known."""
        return True

    def _build(
        self,
        wanted: Sequence[Wanted[SessionType]],
        ranked: Iterable[RankedPaths],
        proposals: dict[SequenceId, Proposal],
    ) -> None:
        """Build the tree of each row from its ranked paths."""
        for (row, budget, session), paths in zip(wanted, ranked, strict=True):
            proposals[row.sequence_id] = self._trees.propose(row, budget, session, paths)


def decision_contexts(sessions: Sequence[PathSession], depths: int) -> list[DecisionContext]:
    """The contexts [sessions x depths] of the decisions at the next `depths` positions of each sequence."""
    return [
        DecisionContext(
            one.start.sampling,
            Branch(one.tokens, (_NOT_DRAFTED,) * depth),
            one.start.prompt_len,
            allowed_at(one.next_tokens, depth),
        )
        for one in sessions
        for depth in range(depths)
    ]
