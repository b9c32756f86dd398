"""Token Recycling (Luo et al. 2024): drafts what the target last ranked highest after the same tokens.

Every step of the target ranks many tokens and commits few. A request keeps the most probable successors of every
context of one to `context` tokens in its text, and the draft is the tree of the most probable paths. Where the request
does not know enough successors, a table has those of single tokens: from a module of the kind `table`, and of its other
tokens what the target ranked highest in requests with the same API key and `cache_salt`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from cluster.core.config.base import ModuleSection
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, Evidence, EvidenceNeeds
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT, TokenTree
from workers.draft.lookup.continuation_tree import LEAST_PATH_PROBABILITY, ContinuationTree
from workers.draft.lookup.sequence_drafter import DraftedSession, EstimatingDrafter, Reliability
from workers.draft.lookup.successors import (
    Context,
    ContextSuccessors,
    FoundSuccessors,
    RankRates,
    Rows,
    Successors,
    SuccessorTables,
)
from workers.draft.registry import ON_TARGET_FIRST, register

Rates = dict[bool, list[RankRates]]
"""Greedy or not: the rates by the length of the known context."""


class RecyclingSettings(ModuleSection):
    """Settings of drafts from a table of successors. Without a `path`, or with a table for a vocabulary of another size
    than the target's, the table begins empty."""

    draft_kind: ClassVar[str] = "table"
    successors: Annotated[int, Field(ge=1, le=32)] = 8
    """Successors stored for each token and context, and most that are drafted after one."""
    context: Annotated[int, Field(ge=1, le=8)] = 3
    """Most tokens of a context whose successors a request keeps. A token of a text takes about 200 bytes for each
    length."""
    salts: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most tables: one for each API key and `cache_salt`, of 4 bytes x `successors` x vocabulary. The
    least recently used one is evicted."""


class RecyclingSession(DraftedSession):
    """Committed tokens, the successors of their contexts, and the table of their salt."""

    __slots__ = ("_contexts", "_rates", "_tables")

    def __init__(
        self, start: SequenceStart, contexts: ContextSuccessors, tables: SuccessorTables, rates: Rates
    ) -> None:
        super().__init__(start)
        self._contexts = contexts
        self._tables = tables
        self._rates = rates

    @property
    def table(self) -> Successors:
        """The table of this sequence's salt."""
        return self._tables.of(self.start.cache_salt)

    @property
    def end(self) -> Context:
        """The context of the next token."""
        return self._contexts.before(self.tokens, len(self.tokens))

    def longer(self, context: Context, token: int) -> Context:
        """The context after one more token."""
        return (*context, token)[-self._contexts.longest :]

    def after(self, context: Context, table: Successors) -> tuple[RankRates, FoundSuccessors]:
        """The successors of a context, and how often that of each rank comes next."""
        found = self._contexts.after(context, table.after(context[-1]))
        return self._rates[self.is_greedy][found.length], found

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end. Each token is a successor of those before. Tokens of the answer update the rates."""
        first = len(self.tokens)
        super().append(tokens)
        contexts, table = self._contexts, self.table
        for position in range(max(1, first), len(self.tokens)):
            context, token = contexts.before(self.tokens, position), self.tokens[position]
            if position >= self.start.prompt_len:
                rates, found = self.after(context, table)
                rates.observe(found.successors, token)
            contexts.add(context, token)
            table.add(context[-1], token)

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """Learn from what the target showed. Stores the target's most probable tokens after accepted tokens, and its
        decisions after the other ones, whose longer contexts the text does not have."""
        contexts, table = self._contexts, self.table
        for one in evidence:
            if one.decisions:
                for token, decision in zip(one.tree.tokens, one.decisions[1:], strict=False):
                    if decision >= 0:
                        contexts.add((token,), decision)
                        table.add(token, decision)
            for position, best in enumerate(one.top, one.base_len):
                if 0 < position < len(self.tokens):
                    taken = self.tokens[position]
                    row = best if taken in best else (taken, *best)
                    contexts.replace(contexts.before(self.tokens, position), row)
                    table.replace(self.tokens[position - 1], row)


class RecyclingDrafter(EstimatingDrafter[RecyclingSession]):
    """Drafts the most probable paths after each row's text. It is a `DraftMethod`."""

    def __init__(self, settings: RecyclingSettings, draft: DraftSection, given: Rows | None = None) -> None:
        """`given`: see `SuccessorTables`."""
        count, longest = settings.successors, settings.context
        tables = SuccessorTables(count, settings.salts, given)
        rates = {is_greedy: [RankRates(count, length) for length in range(longest + 1)] for is_greedy in (True, False)}
        super().__init__(lambda start: RecyclingSession(start, ContextSuccessors(longest, count), tables, rates), draft)

    def _draft(self, session: RecyclingSession, budget: DraftBudget, reliability: Reliability) -> ContinuationTree:
        return _best_first(session, budget.max_nodes, budget.max_depth, reliability)


def _best_first(
    session: RecyclingSession, max_nodes: int, max_depth: int, reliability: Reliability
) -> ContinuationTree:
    """The tree of the most probable nodes, below the tokens that the grammar forces. Nothing follows a token that ends
    the answer."""
    table, ends = session.table, session.start.sampling.end_token_ids
    known = session.next_tokens
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    conditionals: list[float] = []
    serial = 0
    origins: list[DraftOrigin] = []
    # Minus the path probability, a serial number that breaks ties, the uncorrected estimate, token, parent, depth, the
    # context before the token and the origin.
    heap: list[tuple[float, int, float, int, int, int, Context, DraftOrigin]] = []

    def push_children(context: Context, node: int, depth: int, path: float) -> None:
        nonlocal serial
        rates, (_, successors, own) = session.after(context, table)
        found = [
            (rank, one, rates[rank], reliability.probability(rates[rank]))
            for rank, one in enumerate(successors)
            if known.permits(depth - 1, one)
        ]
        shared = DraftOrigin.TRAINED if table.is_given(context[-1]) else DraftOrigin.EARLIER
        scale = max(1.0, sum(corrected for *_, corrected in found))
        for rank, successor, estimate, corrected in found:
            probability = path * corrected / scale
            if probability >= LEAST_PATH_PROBABILITY:
                serial += 1
                origin = DraftOrigin.REQUEST if rank < own else shared
                heapq.heappush(heap, (-probability, serial, estimate, successor, node, depth, context, origin))

    context, forced = session.end, known.forced[: min(max_nodes, max_depth)]
    for node, token in enumerate(forced, ROOT):
        tokens.append(token)
        parents.append(node)
        probabilities.append(1.0)
        conditionals.append(1.0)
        origins.append(DraftOrigin.REQUEST)
        context = session.longer(context, token)
    if len(forced) < max_depth:
        push_children(context, len(forced) - 1, len(forced) + 1, 1.0)
    while heap and len(tokens) < max_nodes:
        path, _, conditional, token, parent, depth, context, origin = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        probabilities.append(-path)
        conditionals.append(conditional)
        origins.append(origin)
        if depth < max_depth and token not in ends:
            push_children(session.longer(context, token), len(tokens) - 1, depth + 1, -path)
    return ContinuationTree(
        TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities), tuple(conditionals), origins=tuple(origins)
    )


@register(
    "recycling",
    RecyclingSettings,
    needs=lambda settings: EvidenceNeeds(top=settings.successors, decisions=True),
    places=ON_TARGET_FIRST,
)
def create_recycling(settings: RecyclingSettings, draft: DraftSection, target: TargetSection) -> RecyclingDrafter:
    """Create the method `recycling`. Raises `ModelLoadError` if `path` holds no table."""
    given = None
    if settings.path:
        from workers.model.drafting.stored_table import read_successors_for

        given = read_successors_for(Path(target.path), Path(settings.path))
    return RecyclingDrafter(settings, draft, given)
