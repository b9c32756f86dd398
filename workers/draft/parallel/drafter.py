"""A drafter with heads that predict all depths at once from one hidden state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Evidence, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.hidden_states import TapReader
from workers.draft.parallel.paths import PathCalibration, RankedPaths, Shape, draft_paths
from workers.draft.sessions import Session, Sessions
from workers.sampling.context import GREEDY_BELOW, Branch, DecisionContext

if TYPE_CHECKING:
    from torch import Tensor

_NOT_DRAFTED = -1
"""Placeholder for the tokens between the committed ones and a depth, which are not known. Penalties ignore it."""


class Heads(Protocol):
    """Predicts all depths of rows at once."""

    depths: int
    vocabulary_size: int

    def rank(
        self, taps: Sequence[Tensor], last: Sequence[int], contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        """Rank the candidates of each row at each depth; see `ParallelHeads`."""
        ...


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The candidates after `base_len` tokens, and the last proposal from them."""

    base_len: int
    start: SequenceStart
    ranked: RankedPaths
    budget: DraftBudget
    proposal: Proposal


class HeadsSession(Session):
    """Committed tokens, the target's last hidden state, and the last draft."""

    __slots__ = ("drafted", "hidden", "hidden_position", "is_streak")

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self.hidden: Tensor | None = None
        """[hidden size] at `hidden_position`."""
        self.hidden_position = -1
        self.drafted: _Drafted | None = None
        self.is_streak = True
        """Whether the last committed token was a first candidate."""

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """See `Session`. What depends on a token that changes is dropped."""
        held = self.tokens[known_len:]
        most = min(len(held), len(new_tokens))
        same = next((index for index in range(most) if held[index] != new_tokens[index]), most)
        if same < len(held):
            self.drafted = None
            if self.hidden_position >= known_len + same:
                self.hidden = None
        self.tokens[known_len + same :] = new_tokens[same:]

    def take(self, evidence: Sequence[Evidence], reader: TapReader) -> None:
        """Store the hidden state at the last position but one. Raises `ValueError` for one of a wrong width."""
        position = len(self.tokens) - 2
        for one in reversed(evidence):
            if one.hidden is not None and one.hidden.first <= position < one.hidden.end:
                found = reader.read(one)
                if found is not None:
                    self.hidden, self.hidden_position = found[1][position - found[0], -1].clone(), position
                return

    def observe(self, calibration: PathCalibration) -> None:
        """Learn from the tokens that were committed since the last draft, once."""
        drafted = self.drafted
        if drafted is not None and len(self.tokens) > drafted.base_len:
            self.drafted = None
            taken = self.tokens[drafted.base_len :]
            self.is_streak = calibration.observe(drafted.ranked, taken, self.is_greedy, self.is_streak)

    @property
    def is_ready(self) -> bool:
        """Whether the hidden state that a draft needs is stored. It is not where its KV came from a cache."""
        return self.hidden is not None and self.hidden_position == len(self.tokens) - 2

    @property
    def is_greedy(self) -> bool:
        """Whether the target decodes greedily."""
        return self.start.sampling.temperature < GREEDY_BELOW

    def contexts(self, depths: int) -> list[DecisionContext]:
        """The contexts of the decisions at the next `depths` positions."""
        start = self.start
        return [
            DecisionContext(start.sampling, Branch(self.tokens, (_NOT_DRAFTED,) * depth), start.prompt_len)
            for depth in range(depths)
        ]


class HeadsDrafter:
    """Drafts trees of the heads' candidates, one pass for all rows. It is a `DraftMethod`.

    A sequence without the hidden state before its last token gets no draft.
    """

    def __init__(
        self, heads: Heads, reader: TapReader, draft: DraftSection, siblings: int, shape: Shape | None
    ) -> None:
        """`siblings` is the number of candidates below one node. `shape`: see `draft_paths`."""
        self._heads = heads
        self._reader = reader
        self._siblings = siblings
        self._shape = shape
        self._max_nodes = draft.max_nodes
        self._max_depth = min(draft.max_depth, heads.depths)
        self._calibration = PathCalibration(heads.depths)
        self._sessions = Sessions(HeadsSession, vocabulary_size=heads.vocabulary_size)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """See `DraftMethod`."""
        proposals = {row.sequence_id: Proposal(row.sequence_id, row.base_len) for row in rows}
        wanted: list[tuple[DraftRow, DraftBudget, HeadsSession]] = []
        for row in rows:
            session = self._sessions.apply(row)
            if isinstance(session, RowFault):
                proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len, fault=session)
                continue
            try:
                session.take(row.evidence, self._reader)
            except ValueError as error:
                fault = RowFault(RowFaultCode.INVALID, f"evidence: {error}")
                proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len, fault=fault)
                continue
            session.observe(self._calibration)
            budget = self._within(row.budget)
            if budget.max_depth and session.is_ready:
                last = session.drafted
                if last is not None and last.budget == budget and last.start == session.start:
                    proposals[row.sequence_id] = last.proposal
                else:
                    wanted.append((row, budget, session))
        if wanted:
            self._draft(wanted, proposals)
        return tuple(proposals[row.sequence_id] for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `DraftMethod`."""
        self._sessions.release(sequence_ids)

    def _within(self, budget: DraftBudget) -> DraftBudget:
        max_nodes = max(0, min(budget.max_nodes, self._max_nodes))
        return DraftBudget(max_nodes, max(0, min(budget.max_depth, self._max_depth, max_nodes)))

    def _draft(
        self, wanted: Sequence[tuple[DraftRow, DraftBudget, HeadsSession]], proposals: dict[SequenceId, Proposal]
    ) -> None:
        """Rank all rows' candidates to the same depth and build a tree for each."""
        depths = max(budget.max_depth for _, budget, _ in wanted)
        taps = [session.hidden for _, _, session in wanted if session.hidden is not None]
        last = [session.tokens[-1] for _, _, session in wanted]
        contexts = [context for _, _, session in wanted for context in session.contexts(depths)]
        ranked = self._heads.rank(taps, last, contexts, self._siblings)
        for (row, budget, session), paths in zip(wanted, ranked, strict=True):
            tree, probabilities = draft_paths(
                paths,
                budget,
                self._calibration,
                is_greedy=session.is_greedy,
                is_streak=session.is_streak,
                ends=session.start.sampling.end_token_ids,
                shape=self._shape,
            )
            proposal = Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities)
            session.drafted = _Drafted(row.base_len, session.start, paths, budget, proposal)
            proposals[row.sequence_id] = proposal
