"""The method `lookahead`: n-grams that the target's own decisions complete, drafted from a pool, beside a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Evidence, NextTokens, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from workers.draft.lookahead import LookaheadDrafter, LookaheadSettings, NgramPool, create_lookahead
from workers.draft.lookup.jacobi_window import JacobiWindow

A = SequenceId("a")
BUDGET = DraftBudget(32, 16)
GREEDY = SamplingParameters(temperature=0.0)
PROMPT = (1, 50, 51, 52)

Rule = Callable[[Sequence[int]], int]
"""A target: it decides the token after a text."""


def count_up(text: Sequence[int]) -> int:
    """The next number; after 9 again 0."""
    return (text[-1] + 1) % 10


def drafter(**settings: object) -> LookaheadDrafter:
    return create_lookahead(
        LookaheadSettings.model_validate(settings), DraftSection(max_nodes=64, max_depth=32), TargetSection()
    )


def decide(rule: Rule, text: Sequence[int], tree: TokenTree) -> tuple[int, ...]:
    """The target's decisions after the root and after every node."""
    return tuple(rule([*text, *tree.path_tokens(node)]) for node in (ROOT, *range(len(tree))))


class Decoding:
    """Decodes one sequence with a drafter and a rule for a target."""

    def __init__(self, method: LookaheadDrafter, rule: Rule, budget: DraftBudget = BUDGET) -> None:
        self.method, self.rule, self.budget = method, rule, budget
        self.tokens = [*PROMPT, rule(PROMPT)]
        start = SequenceStart(len(PROMPT), GREEDY)
        self.row = DraftRow(A, len(self.tokens), tuple(self.tokens), budget, start)
        self.accepted: list[int] = []

    def step(self, shown: bool = True, verified: bool = True) -> Proposal:
        """Draft, verify the draft, and give the next row the evidence. Returns the proposal."""
        found = self.method.propose([self.row])[0]
        assert found.fault is None
        tree = found.tree if verified else EMPTY_TREE
        decisions = decide(self.rule, self.tokens, tree)
        new, node = [decisions[0]], tree.child(ROOT, decisions[0])
        while node is not None:
            new.append(decisions[node + 1])
            node = tree.child(node, new[-1])
        self.accepted.append(len(new) - 1)
        evidence = (Evidence(len(self.tokens), tree, decisions),) if shown else ()
        self.tokens += new
        self.row = DraftRow(A, len(self.tokens), tuple(new), self.budget, evidence=evidence)
        return found


def test_n_grams_that_never_occurred_in_the_text_are_drafted_and_accepted() -> None:
    decoding = Decoding(drafter(window=6, ngram=4, text="off"), lambda text: (text[-1] * 7 + 3) % 40)
    for _ in range(30):
        decoding.step()
    assert sum(decoding.accepted) > 10


def test_without_evidence_only_the_text_gives_candidates() -> None:
    blind = Decoding(drafter(), lambda text: 100 + len(text))
    for _ in range(12):
        blind.step(shown=False)
    assert sum(blind.accepted) == 0
    reading = Decoding(drafter(text="on"), count_up)
    for _ in range(14):
        reading.step(shown=False)
    assert sum(reading.accepted) > 6


def test_repetitive_text_is_drafted_from_the_text_itself() -> None:
    tokens = (5, 6, 7, 8, 5, 6, 7, 8, 5)
    row = DraftRow(A, len(tokens), tokens, BUDGET, SequenceStart(9, GREEDY))
    assert drafter().propose([row])[0].tree.path_tokens(2) == (6, 7, 8)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 12, 23, 64])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 16])
def test_the_tree_stays_within_any_budget(nodes: int, depth: int) -> None:
    decoding = Decoding(drafter(window=5, ngram=4, candidates=3), count_up, DraftBudget(nodes, depth))
    for _ in range(14):
        found = decoding.step()
        assert len(found.tree) <= nodes
        assert found.tree.depth() <= depth
        assert len(found.probabilities) == len(found.tree)
        for node, parent in enumerate(found.tree.parents):
            assert 0.0 < found.probabilities[node] <= (1.0 if parent == ROOT else found.probabilities[parent])


def test_a_whole_window_has_a_trunk_and_a_chain_below_each_of_its_nodes() -> None:
    decoding = Decoding(drafter(window=3, ngram=4, candidates=1, text="off"), lambda text: 100 + len(text))
    found = decoding.step()
    assert sorted(found.tree.depths()) == [1, 2, 2, 3, 3, 3, 4, 4, 5]


def test_a_window_is_verified_whole_and_its_tokens_are_improbable() -> None:
    decoding = Decoding(drafter(text="off"), lambda text: 100 + len(text))
    found = decoding.step()
    assert not found.is_prunable
    assert max(found.probabilities) < 0.1


def test_candidates_without_a_window_may_be_pruned() -> None:
    tokens = (5, 6, 7, 8, 5, 6, 7, 8, 5)
    row = DraftRow(A, len(tokens), tokens, DraftBudget(3, 3), SequenceStart(9, GREEDY))
    found = drafter().propose([row])[0]
    assert found.tree == TokenTree.chain((6, 7, 8))
    assert found.is_prunable


def after_text(*, forced: Sequence[int] = (), allowed: Sequence[int] = ()) -> Proposal:
    """The proposal after a text that repeats 5, 6, 7, 8 and ends with 5, for a grammar."""
    tokens = (5, 6, 7, 8, 5, 6, 7, 8, 5)
    known = NextTokens(tuple(forced), bytes(token in allowed for token in range(20)))
    return drafter().propose([DraftRow(A, 9, tokens, BUDGET, SequenceStart(9, GREEDY), next_tokens=known)])[0]


def test_after_tokens_that_a_grammar_forces_the_pool_goes_on_and_there_is_no_window() -> None:
    found = after_text(forced=(9, 6), allowed=(7, 9))
    assert found.tree == TokenTree.chain((9, 6, 7, 8, 5))
    assert found.probabilities[:2] == (1.0, 1.0) and max(found.probabilities[2:]) < 1.0
    assert found.is_prunable
    assert after_text(forced=(9, 6), allowed=(9,)).tree == TokenTree.chain((9, 6))


def test_a_draft_begins_with_tokens_that_the_grammar_allows_and_so_does_the_window() -> None:
    found = after_text(allowed=(7, 9))
    assert {token for token, parent in zip(found.tree.tokens, found.tree.parents, strict=True) if parent == ROOT} == {7}
    assert not found.is_prunable  # it has a window


def test_without_a_token_that_the_grammar_allows_in_the_text_nothing_is_drafted() -> None:
    assert not after_text(allowed=(9, 10)).tree.tokens


def test_of_a_long_text_only_the_end_is_searched_for_a_token_that_the_grammar_allows() -> None:
    """A grammar that allows none of its tokens costs the same in each round, whatever the length of the text."""
    tried: list[int] = []

    class Counted(NextTokens):
        def permits(self, depth: int, token: int) -> bool:
            tried.append(token)
            return super().permits(depth, token)

    tokens = tuple(range(5, 13)) * 4096
    known = Counted((), bytes(20))
    row = DraftRow(A, len(tokens), tokens, BUDGET, SequenceStart(len(tokens), GREEDY), next_tokens=known)
    assert not drafter().propose([row])[0].tree.tokens
    assert 8 <= len(tried) < 400


def test_a_repeated_row_repeats_its_proposal_and_evidence_counts_once() -> None:
    method = drafter()
    decoding = Decoding(method, count_up)
    for _ in range(8):
        decoding.step()
        assert method.propose([decoding.row]) == method.propose([decoding.row])


def test_steps_without_the_draft_or_a_budget_leave_the_method_usable() -> None:
    decoding = Decoding(drafter(), count_up)
    for turn in range(12):
        decoding.budget = NO_DRAFT if turn % 3 == 1 else BUDGET
        decoding.step(verified=turn % 4 != 0)
    assert sum(decoding.accepted) > 0


def test_replaced_tokens_drop_the_window() -> None:
    method = drafter(text="off")
    decoding = Decoding(method, count_up)
    for _ in range(5):
        decoding.step()
    found = method.propose([DraftRow(A, 5, (77,), BUDGET)])[0]
    assert found.fault is None
    assert len(found.tree) > 0


def test_columns_advance_by_one_position_per_step() -> None:
    window = JacobiWindow()
    window.place(10, 2, lambda position, before: (position, 90))
    assert window.paths(2) == [(10, 90), (10, 11, 90)]
    tree = TokenTree.from_candidates(window.paths(2), 8)
    evidence = Evidence(10, tree, (0, 21, 22, 23, 24))
    assert window.observe(evidence) == [(10, 90, 22), (11, 90, 24)]
    assert window.observe(evidence) == []  # the same evidence again
    window.place(11, 3, lambda position, before: (before or 0, position))
    assert window.paths(3) == [(90, 22), (90, 90, 24), (90, 90, 90, 13)]


def test_columns_before_the_new_text_are_dropped_and_those_outside_the_tree_stay() -> None:
    window = JacobiWindow()
    window.place(10, 3, lambda position, before: (position, 90))
    tree = TokenTree.from_candidates(window.paths(1), 8)
    assert window.observe(Evidence(10, tree, (0, 21, 22))) == [(10, 90, 22)]
    window.place(12, 2, lambda position, before: (70, 71))
    assert window.paths(2) == [(12, 90), (12, 70, 71)]


def test_the_pool_keeps_the_latest_continuations_of_each_token() -> None:
    pool = NgramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 8, 9)):
        pool.add(ngram)
    assert pool.after(1) == ((6, 7), (2, 3))
    assert pool.after(2) == ((8, 9),)
    assert pool.after(3) == ()
