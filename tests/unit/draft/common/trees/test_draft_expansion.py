"""Draft trees within calls: the best nodes are proposed, committed paths stay, and no token is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.drafting import DraftBudget, DraftRow, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from tests.support.engines.tree_drafter import BUDGET, PROMPT, DrafterHarness
from tests.support.fakes.fake_expander import continued, ranked
from workers.draft.common.trees.expander import DraftedToken, ExpansionRow


def test_the_first_proposal_contains_the_models_greedy_continuation(serial: DrafterHarness) -> None:
    proposal = serial.propose(budget=DraftBudget(16, 4))
    tree, node = proposal.tree, ROOT
    for token in continued(PROMPT, 4):
        child = tree.child(node, token)
        assert child is not None
        node = child


def test_every_path_of_the_tree_is_one_of_the_models_candidates(serial: DrafterHarness) -> None:
    tree = serial.propose(budget=DraftBudget(16, 8)).tree
    assert len(tree) == 16
    for node, parent in enumerate(tree.parents):
        before = (*PROMPT, *tree.path_tokens(parent))
        assert tree.tokens[node] in ranked(before)


def test_the_most_probable_nodes_are_proposed_and_none_is_more_probable_than_its_parent(serial: DrafterHarness) -> None:
    proposal = serial.propose()
    assert len(proposal.probabilities) == len(proposal.tree) == 8
    for node, parent in enumerate(proposal.tree.parents):
        above = 1.0 if parent == ROOT else proposal.probabilities[parent]
        assert 0.0 <= proposal.probabilities[node] <= above
    smaller = serial.propose(budget=DraftBudget(3, 4))
    assert sorted(smaller.probabilities) == sorted(proposal.probabilities)[-3:]


def test_each_node_is_followed_by_its_most_probable_child(serial: DrafterHarness) -> None:
    tree = serial.propose(budget=DraftBudget(16, 4)).tree
    assert tree.tokens[:3] == tuple(continued(PROMPT, 3))
    assert tree.parents[:3] == (-1, 0, 1)


def test_one_candidate_makes_a_chain(serial: DrafterHarness) -> None:
    chain = DrafterHarness(confidences=[0.9])
    proposal = chain.propose(budget=DraftBudget(6, 8))
    assert proposal.tree == TokenTree.chain(continued(PROMPT, 6))
    assert [len(row_lengths) for row_lengths in chain.expander.passes] == [1] * 6


def test_no_pass_is_made_for_tokens_after_the_end_of_an_answer() -> None:
    chain = DrafterHarness(mode="enumerate", confidences=[0.9])
    path = continued(PROMPT, 4)
    chain.sampling = SamplingParameters(temperature=0.0, end_token_ids=(path[2],))
    end = path.index(path[2]) + 1
    proposal = chain.propose(budget=DraftBudget(6, 8))
    assert proposal.tree == TokenTree.chain(path[:end])
    assert [len(row_lengths) for row_lengths in chain.expander.passes] == [1] * end
    assert chain.run_ahead() == 0


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_tree_is_no_deeper_than_its_budget_and_takes_no_more_passes(serial: DrafterHarness, depth: int) -> None:
    assert serial.propose(budget=DraftBudget(16, depth)).tree.depth() <= depth
    assert len(serial.expander.passes) <= depth


def test_a_pass_expands_no_more_nodes_of_a_tree_than_its_width() -> None:
    harness = DrafterHarness(width=2)
    harness.propose(budget=DraftBudget(16, 8))
    assert max(len(row_lengths) for row_lengths in harness.expander.passes) == 2


def test_sequences_share_their_passes(serial: DrafterHarness) -> None:
    together = serial.propose_all("abc")
    assert len(serial.expander.passes) <= BUDGET.max_depth
    assert [proposal.tree for proposal in together] == [DrafterHarness().propose().tree] * 3


def test_a_repeated_row_repeats_its_proposal(serial: DrafterHarness) -> None:
    before = serial.propose()
    again = serial.propose()
    assert (again.tree, again.probabilities) == (before.tree, before.probabilities)
    assert (before.ready, again.ready) == (0, 8)
    assert serial.tokens_computed == 0


def test_nodes_below_the_committed_path_stay_and_are_not_computed_again(serial: DrafterHarness) -> None:
    before = serial.propose(budget=DraftBudget(16, 4))
    accepted = continued(PROMPT, 2)
    after = serial.propose("a", *accepted, budget=DraftBudget(2, 2))
    assert after.ready == len(after.tree) == 2
    assert serial.tokens_computed == 0
    assert set(after.tree.tokens) <= set(before.tree.tokens)


def test_a_correction_that_was_drafted_keeps_its_stored_subtree() -> None:
    harness = DrafterHarness("enumerate")
    harness.propose()
    harness.run_ahead()
    correction = ranked(PROMPT)[1]
    proposal = harness.propose("a", correction, budget=DraftBudget(3, 1))
    assert proposal.tree.tokens == tuple(ranked((*PROMPT, correction)))
    assert (proposal.ready, harness.tokens_computed) == (3, 0)


def test_after_a_correction_that_was_not_drafted_only_it_is_computed(serial: DrafterHarness) -> None:
    serial.propose(budget=DraftBudget(16, 4))
    accepted = continued(PROMPT, 2)
    other = next(token for token in range(7) if token not in ranked((*PROMPT, *accepted)))
    serial.propose("a", *accepted, other)
    assert serial.expander.passes[0] == [1]


def test_after_full_acceptance_only_the_last_drafted_token_and_the_bonus_token_are_computed() -> None:
    chain = DrafterHarness(confidences=[0.9])
    drafted = chain.propose(budget=DraftBudget(4, 4)).tree.tokens
    chain.propose("a", *drafted, *continued((*PROMPT, *drafted), 1))
    assert chain.expander.passes[0] == [2]


def test_a_row_that_arrives_late_removes_tokens_and_its_successor_is_out_of_sync(serial: DrafterHarness) -> None:
    serial.propose()
    serial.propose("a", 1, 2)
    late = DraftRow(SequenceId("a"), len(PROMPT) + 1, (1,), BUDGET)
    assert serial.drafter.propose([late])[0].tree == DrafterHarness().propose("b", *PROMPT, 1).tree
    fault = serial.propose("a", 3).fault
    assert fault is not None
    assert (fault.code, fault.stored_len) == (RowFaultCode.OUT_OF_SYNC, len(PROMPT) + 1)


def test_a_start_with_other_parameters_drops_the_tree_and_keeps_the_stored_text(serial: DrafterHarness) -> None:
    serial.propose()
    start = SequenceStart(2, SamplingParameters(temperature=1.0, seed=3))
    serial.expander.passes.clear()
    proposal = serial.drafter.propose([DraftRow(SequenceId("a"), len(PROMPT), PROMPT, BUDGET, start)])[0]
    assert proposal.ready == 0
    assert serial.expander.passes[0] == [1]  # the stored text is valid for both


def test_a_row_without_a_budget_only_commits(serial: DrafterHarness) -> None:
    assert serial.propose(budget=DraftBudget(0, 4)).tree == EMPTY_TREE
    assert serial.propose("a", 1, budget=DraftBudget(4, 0)).tree == EMPTY_TREE
    assert serial.tokens_computed == 0
    assert serial.propose("a", 1).tree == DrafterHarness().propose("b", *PROMPT, 1, 1).tree


@pytest.mark.parametrize(("pass_seconds", "depth"), [(0.009, 1), (0.001, 3)])
def test_a_full_tree_is_expanded_further_only_where_the_gain_exceeds_the_lost_time(
    pass_seconds: float, depth: int
) -> None:
    """Tokens come at one per 10 ms: a pass of 9 ms must gain 0.9 tokens, which it cannot; one of 1 ms must gain 0.1."""
    harness = DrafterHarness()
    expand = harness.expander.expand

    def slow(rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        harness.now += pass_seconds
        return expand(rows)

    harness.expander.expand = slow  # type: ignore[method-assign]
    for _ in range(20):
        begun = harness.now
        committed = continued(harness.tokens["a"], 9)[:1] if harness.tokens else ()
        proposal = harness.propose("a", *committed, budget=DraftBudget(3, 8))
        harness.now = max(harness.now, begun + 0.01)
    assert proposal.tree.depth() == depth
