"""Lookahead decoding (Fu et al. 2024): the target itself finds the n-grams that are drafted, beside verifying them.

Each step of the target verifies candidates from a pool of n-grams, and computes one Jacobi iteration of a window of
provisional tokens. Both are branches of one token tree. The decisions at the window's nodes complete new n-grams, which
the pool stores. The window adds tokens to a step, but no pass: it saves time where tokens hardly make a step longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from cluster.core.config.base import Choice, PluginSettings
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, Evidence, EvidenceNeeds
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT, TokenTree
from workers.draft.lookup.continuation_tree import Continuation, ContinuationTree
from workers.draft.lookup.jacobi_window import JacobiWindow
from workers.draft.lookup.lookup_drafter import LookupSession
from workers.draft.lookup.sequence_drafter import EstimatingDrafter, Reliability
from workers.draft.registry import ON_TARGET_FIRST, register

_FIRST_RATE, _NEXT_RATE = 0.4, 0.6
"""Assumed acceptance rates of a candidate's first token (divided by the candidate's rank) and of each further one."""
_WINDOW_RATE = 0.03
"""Assumed acceptance rate of a window's token that is no candidate's."""
_MOST_FIRST_TOKENS = 4096
"""Most first tokens with n-grams in one pool; the one without a new n-gram for the longest time is evicted."""
_STRIDE = 7919
"""A prime. Where the pool has no n-gram, a new column is copied from index `position * _STRIDE` modulo length."""
_MOST_TRIED = 256
"""Most tokens from the end of the text that are tried in the place of one that the grammar excludes."""


class LookaheadSettings(PluginSettings):
    """Settings of lookahead decoding. A whole tree needs `draft.max_nodes` of (window + candidates) × (ngram - 1) and
    `draft.max_depth` of window + ngram - 2; with less, the window shrinks."""

    window: Annotated[int, Field(ge=1, le=64)] = 4
    """Columns of the window (W in the paper)."""
    ngram: Annotated[int, Field(ge=2, le=16)] = 4
    """Tokens of an n-gram (N in the paper)."""
    candidates: Annotated[int, Field(ge=1, le=64)] = 4
    """Most n-grams in the pool with the same first token, and most that one tree has (G in the paper)."""
    text: Choice[Literal["off", "on"]] = "on"
    """`on` adds the n-grams of prompt and answer to the pool."""


class NgramPool:
    """What followed a token, at most `most` continuations of each token: the latest ones."""

    __slots__ = ("_found", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the latest one of its first token."""
        first, continuation = ngram[0], tuple(ngram[1:])
        found = self._found.setdefault(first, OrderedDict())
        found[continuation] = None
        found.move_to_end(continuation)
        if len(found) > self._most:
            found.popitem(last=False)
        self._found.move_to_end(first)
        if len(self._found) > _MOST_FIRST_TOKENS:
            self._found.popitem(last=False)

    def after(self, token: int) -> tuple[tuple[int, ...], ...]:
        """The continuations of `token`, the latest first."""
        return tuple(reversed(self._found.get(token, ())))


class LookaheadSession(LookupSession):
    """Committed tokens, the pool of n-grams, and the window after the tokens."""

    __slots__ = ("_settings", "pool", "window")

    def __init__(self, start: SequenceStart, settings: LookaheadSettings) -> None:
        super().__init__(start)
        self._settings = settings
        self.pool = NgramPool(settings.candidates)
        self.window = JacobiWindow()

    def continuations(self, forced: Sequence[int], length: int) -> Sequence[Continuation]:
        """Possible continuations of the committed tokens and the tokens `forced`, of at most `length` tokens."""
        return [Continuation(found[:length], 1) for found in self.pool.after((self.tokens[-1], *forced)[-1])]

    def remove(self, length: int) -> None:
        """Remove the tokens from position `length` on."""
        super().remove(length)
        self.window.clear()

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        first = len(self.tokens) + 1
        super().append(tokens)
        size = self._settings.ngram
        if self._settings.text == "on":
            for end in range(max(first, size), len(self.tokens) + 1):
                self.pool.add(self.tokens[end - size : end])

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """Learn from what the target showed. Adds the n-grams that the target's decisions complete."""
        for one in evidence:
            for ngram in self.window.observe(one):
                self.pool.add(ngram)

    def new_column(self, position: int, before: int | None) -> tuple[int, ...]:
        """The first tokens of a new column: what the pool has after the token `before` it, or tokens of the text."""
        known = self.pool.after(self.tokens[-1] if before is None else before)
        if known:
            return known[0]
        first = position * _STRIDE
        return tuple(self.tokens[(first + step) % len(self.tokens)] for step in range(self._settings.ngram - 1))

    def fitted(self, position: int, column: tuple[int, ...]) -> tuple[int, ...]:
        """A column from `position` on; the latest token of the text that the grammar permits takes the place of a first
        one that it excludes. No token where none of the latest 256 may be there."""
        known, depth = self.next_tokens, position - len(self.tokens)
        if known.permits(depth, column[0]):
            return column
        latest = reversed(self.tokens[-_MOST_TRIED:])
        return next(((one, *column[1:]) for one in latest if known.permits(depth, one)), ())


class LookaheadDrafter(EstimatingDrafter[LookaheadSession]):
    """Drafts each row's candidates and window in one tree."""

    def __init__(self, settings: LookaheadSettings, draft: DraftSection) -> None:
        super().__init__(lambda start: LookaheadSession(start, settings), draft)
        self._settings = settings

    def _draft(self, session: LookaheadSession, budget: DraftBudget, reliability: Reliability) -> ContinuationTree:
        """Candidates get their share of the nodes, then the window gets as many columns as the rest allows.

        There is no window after tokens that the grammar forces: the coordinator puts them in place of a tree that must
        be verified whole.
        """
        nodes, depth = budget.max_nodes, budget.max_depth
        settings = self._settings
        levels = settings.ngram - 1
        share = max(1, nodes // levels * settings.candidates // (settings.window + settings.candidates))
        known = session.next_tokens
        candidates = [tokens for one in session.drafts(depth) if (tokens := known.permitted(one.tokens))][:share]
        tree = TokenTree.from_candidates(candidates, nodes)
        forced = min(len(known.forced), len(tree))
        columns = max(0, min(settings.window, depth - levels + 1, (nodes - len(tree)) // levels)) if not forced else 0
        columns = session.window.place(len(session.tokens), columns, session.new_column, session.fitted)
        whole = TokenTree.from_candidates([*candidates, *session.window.paths(columns)], nodes)
        return _with_rates(whole, len(tree), forced, reliability)


def _with_rates(tree: TokenTree, candidate_nodes: int, forced: int, reliability: Reliability) -> ContinuationTree:
    """Add the acceptance probabilities. The first `candidate_nodes` nodes are those of the candidates, and `forced` of
    them are a chain of sure tokens."""
    conditionals: list[float] = []
    probabilities: list[float] = []
    rank = 0
    for node, parent in enumerate(tree.parents):
        is_first = parent == forced - 1
        rank += is_first
        rate = _WINDOW_RATE if node >= candidate_nodes else _FIRST_RATE / rank if is_first else _NEXT_RATE
        above = 1.0 if parent == ROOT else probabilities[parent]
        conditionals.append(1.0 if node < forced else rate)
        probabilities.append(1.0 if node < forced else above * reliability.probability(rate))
    is_prunable = len(tree) <= candidate_nodes
    return ContinuationTree(tree, tuple(probabilities), tuple(conditionals), is_prunable)


@register(
    "lookahead",
    LookaheadSettings,
    needs=lambda _: EvidenceNeeds(decisions=True),
    places=ON_TARGET_FIRST,
)
def create_lookahead(settings: LookaheadSettings, draft: DraftSection, target: TargetSection) -> LookaheadDrafter:  # noqa: ARG001
    """Create the method `lookahead`."""
    return LookaheadDrafter(settings, draft)
