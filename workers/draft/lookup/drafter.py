"""A drafter that drafts from possible continuations of the text, without a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from cluster.core.config.sections import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal, RowFault
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT
from workers.draft.lookup.continuation_tree import Continuation, ContinuationTree, Estimate, merge
from workers.draft.lookup.reliability import Reliability
from workers.draft.sessions import Session, Sessions
from workers.sampling.context import GREEDY_BELOW


class DraftedSession(Session):
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
                reliability.observe(drafted.conditionals[child], hit)
                taken = child if hit else taken
            if taken is None:
                return
            node = taken

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


class LookupSession(DraftedSession):
    """Committed tokens whose possible continuations are known."""

    __slots__ = ()

    @abstractmethod
    def continuations(self, length: int) -> Sequence[Continuation]:
        """Possible continuations of at most `length` tokens."""


SessionType = TypeVar("SessionType", bound=LookupSession)


class LookupDrafter(Generic[SessionType]):
    """Drafts the most probable continuations of each row's session. It is a `DraftMethod`.

    `rate` maps the length of a match to the probability assumed for the only token that follows it. Estimates are
    corrected by what the target takes, separately for greedy and sampled decoding.
    """

    def __init__(
        self,
        create: Callable[[SequenceStart], SessionType],
        draft: DraftSection,
        rate: Callable[[int], float],
        discard: Callable[[SessionType], None] = lambda _: None,
    ) -> None:
        self._max_nodes = draft.max_nodes
        self._max_depth = draft.max_depth
        self._rate = rate
        self._reliability = {True: Reliability(), False: Reliability()}
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
        session.observe(self._reliability[_is_greedy(session.start)])
        drafted = session.last_draft(row.budget)
        if drafted is None:
            drafted = self._draft(session, row.budget)
            session.set_draft(row.budget, drafted)
        return Proposal(row.sequence_id, row.base_len, drafted.tree, probabilities=drafted.probabilities)

    def _draft(self, session: LookupSession, budget: DraftBudget) -> ContinuationTree:
        max_nodes = min(budget.max_nodes, self._max_nodes)
        max_depth = min(budget.max_depth, self._max_depth, max_nodes)
        if max_depth <= 0:
            return ContinuationTree()
        ends = session.start.sampling.end_token_ids
        return merge(session.continuations(max_depth), max_nodes, max_depth, self._estimate(session), ends)

    def _estimate(self, session: LookupSession) -> Estimate:
        reliability, rate = self._reliability[_is_greedy(session.start)], self._rate

        def estimate(weight: float, total: float, match_length: int) -> float:
            # The rate is that of one occurrence: 1 / (1 + doubt). Each further one that agrees makes it more certain.
            doubt = 1.0 / rate(match_length) - 1.0
            return reliability.probability(weight / (total + doubt))

        return estimate


def _is_greedy(start: SequenceStart) -> bool:
    return start.sampling.temperature < GREEDY_BELOW
