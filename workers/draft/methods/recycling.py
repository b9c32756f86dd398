"""Token Recycling (Luo et al. 2024): drafts what the target last ranked highest after each token.

Every step of the target ranks many tokens and commits few. A table keeps the most probable successors of each token,
and the draft is the tree of its most probable paths. A module of the kind `table` fills
the table before the first request. Only requests with the same `cache_salt` share what is learned while serving.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cluster.core.config.base import ModuleSection
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, Evidence, EvidenceNeeds
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT, TokenTree
from workers.draft.lookup.continuation_tree import LEAST_PATH_PROBABILITY, ContinuationTree
from workers.draft.lookup.reliability import Reliability
from workers.draft.lookup.sequence_drafter import DraftedSession, EstimatingDrafter
from workers.draft.lookup.successor_tables import RankRates, Rows, Successors, SuccessorTables
from workers.draft.registry import register


class RecyclingSettings(ModuleSection):
    """Settings of drafts from a table of successors. Without a `path`, or with a table for a vocabulary of another size
    than the target's, the table begins empty."""

    successors: Annotated[int, Field(ge=1, le=32)] = 8
    """Successors stored for each token, and most that are drafted after one."""
    salts: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most tables: one for each `cache_salt`, of 4 bytes x `successors` x vocabulary. The least recently used one is
    evicted."""


class RecyclingSession(DraftedSession):
    """Committed tokens and the table of their salt."""

    __slots__ = ("_rates", "_tables")

    def __init__(self, start: SequenceStart, tables: SuccessorTables, rates: dict[bool, RankRates]) -> None:
        super().__init__(start)
        self._tables = tables
        self._rates = rates

    @property
    def table(self) -> Successors:
        """The table of this sequence's salt."""
        return self._tables.of(self.start.cache_salt)

    @property
    def rates(self) -> RankRates:
        """How often the successor of each rank comes next."""
        return self._rates[self.is_greedy]

    def append(self, tokens: Sequence[int]) -> None:
        """See `DraftedSession`. Each token is a successor of the one before. Tokens of the answer update the rates."""
        first = len(self.tokens)
        super().append(tokens)
        table, rates = self.table, self.rates
        for position in range(max(1, first), len(self.tokens)):
            before, token = self.tokens[position - 1], self.tokens[position]
            if position >= self.start.prompt_len:
                rates.observe(table.after(before), token)
            table.add(before, token)

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """See `DraftedSession`. Stores the target's most probable tokens after accepted tokens, and its
        decisions after the other ones."""
        table = self.table
        for one in evidence:
            if one.decisions:
                for token, decision in zip(one.tree.tokens, one.decisions[1:], strict=False):
                    if decision >= 0:
                        table.add(token, decision)
            for position, best in enumerate(one.top, one.base_len - 1):
                if 0 <= position < len(self.tokens) - 1:
                    taken = self.tokens[position + 1]
                    table.replace(self.tokens[position], best if taken in best else (taken, *best))


class RecyclingDrafter(EstimatingDrafter[RecyclingSession]):
    """Drafts the most probable paths in the table of each row's salt. It is a `DraftMethod`."""

    def __init__(self, settings: RecyclingSettings, draft: DraftSection, initial: Rows | None = None) -> None:
        """`initial`: see `SuccessorTables`."""
        tables = SuccessorTables(settings.successors, settings.salts, initial)
        rates = {is_greedy: RankRates(settings.successors) for is_greedy in (True, False)}
        super().__init__(lambda start: RecyclingSession(start, tables, rates), draft)

    def _draft(self, session: RecyclingSession, budget: DraftBudget, reliability: Reliability) -> ContinuationTree:
        return _best_first(session, budget.max_nodes, budget.max_depth, reliability)


def _best_first(
    session: RecyclingSession, max_nodes: int, max_depth: int, reliability: Reliability
) -> ContinuationTree:
    """The tree of the most probable nodes. Nothing follows a token that ends the answer."""
    table, rates, ends = session.table, session.rates, session.start.sampling.end_token_ids
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    conditionals: list[float] = []
    serial = 0
    # Minus the path probability, a serial number that breaks ties, the uncorrected estimate, token, parent and depth.
    heap: list[tuple[float, int, float, int, int, int]] = []

    def push_children(token: int, node: int, depth: int, path: float) -> None:
        nonlocal serial
        found = [
            (one, rates[rank], reliability.probability(rates[rank])) for rank, one in enumerate(table.after(token))
        ]
        scale = max(1.0, sum(corrected for _, _, corrected in found))
        for successor, estimate, corrected in found:
            probability = path * corrected / scale
            if probability >= LEAST_PATH_PROBABILITY:
                serial += 1
                heapq.heappush(heap, (-probability, serial, estimate, successor, node, depth))

    push_children(session.tokens[-1], ROOT, 1, 1.0)
    while heap and len(tokens) < max_nodes:
        path, _, conditional, token, parent, depth = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        probabilities.append(-path)
        conditionals.append(conditional)
        if depth < max_depth and token not in ends:
            push_children(token, len(tokens) - 1, depth + 1, -path)
    return ContinuationTree(TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities), tuple(conditionals))


@register(
    "recycling",
    RecyclingSettings,
    needs=lambda settings: EvidenceNeeds(top=settings.successors, decisions=True),
    placements=("target", "drafter"),
)
def create_recycling(settings: RecyclingSettings, draft: DraftSection, target: TargetSection) -> RecyclingDrafter:
    """Create the method `recycling`. Raises `ModelLoadError` if `path` holds no table."""
    initial = None
    if settings.path:
        from workers.model.drafting.stored_table import read_successors_for

        initial = read_successors_for(Path(target.path), Path(settings.path))
    return RecyclingDrafter(settings, draft, initial)
