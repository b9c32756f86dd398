"""The draft model drafts its own decisions, for any stored state and any other rows in the batch."""

from __future__ import annotations

import pytest

from cluster.core.drafting import DraftBudget, RowFaultCode
from cluster.core.request import SamplingParameters
from cluster.core.tree import ROOT, TokenTree
from tests.support.models import tiny
from tests.support.models.draft_model import (
    BUDGET,
    CONTEXT,
    GREEDY,
    MODES,
    PENALISED,
    PROMPT,
    SAMPLED,
    DraftModelHarness,
    Mode,
    ReferenceModel,
    first_row,
    next_row,
)
from workers.forward.loaded_model import LoadedModel


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_draft_with_the_targets_weights_agrees_at_every_position(
    harness: DraftModelHarness, reference: ReferenceModel, sampling: SamplingParameters
) -> None:
    answer = reference.continued(PROMPT, 30, sampling, len(PROMPT))
    tokens = list(PROMPT)
    row = first_row(tokens, sampling=sampling)
    while len(tokens) + BUDGET.max_nodes < len(PROMPT) + len(answer):
        drafted = harness.propose(row)[0].tree
        begun = len(tokens) - len(PROMPT)
        assert drafted == TokenTree.chain(answer[begun : begun + BUDGET.max_nodes])
        committed = answer[begun : begun + len(drafted) + 1]  # all accepted, and the bonus token
        tokens += committed
        row = next_row(tokens, len(committed))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_tree_of_the_targets_own_weights_is_accepted_to_every_depth_in_every_mode(
    loaded: LoadedModel, reference: ReferenceModel, sampling: SamplingParameters, mode: Mode
) -> None:
    answer = reference.continued(PROMPT, 30, sampling, len(PROMPT))
    harness = DraftModelHarness(loaded, candidates=3, mode=mode)
    tokens, taken = list(PROMPT), [1, 4, 0, 3, 2]
    row = first_row(tokens, sampling=sampling, budget=DraftBudget(16, 5))
    ready = 0
    for accepted in taken:
        proposal = harness.propose(row)[0]
        tree, ready = proposal.tree, ready + proposal.ready
        begun = len(tokens) - len(PROMPT)
        node, depth = ROOT, 0
        while node in tree.parents:  # not a leaf: its children include the target's decision
            child = tree.child(node, answer[begun + depth])
            assert child is not None
            node, depth = child, depth + 1
        assert depth > 0
        committed = answer[begun : begun + accepted + 1]
        tokens += committed
        row = next_row(tokens, len(committed), budget=DraftBudget(16, 5))
        while harness.drafter.run_ahead():
            pass
    assert ready > 0 or mode == "serial"
    harness.release_all()
    assert harness.blocks_held == 0


def test_siblings_read_the_keys_and_values_of_their_own_branches(
    loaded: LoadedModel, reference: ReferenceModel
) -> None:
    """The candidates of a node follow its own path, even if several branches wrote into a shared block."""
    harness = DraftModelHarness(loaded, candidates=3, mode="enumerate")
    harness.propose(first_row(PROMPT, budget=DraftBudget(16, 4)))
    for _ in range(6):
        harness.drafter.run_ahead()
    (session,) = harness.drafter._sessions.least_recent()
    expanded = [node for node in session.tree.nodes if node.children]
    assert len({id(node.table) for node in expanded}) > 2
    for node in expanded:
        assert node.table is not None
        path = node.table.tokens[: node.length]
        assert [node.children[0].token] == reference.continued(path, 1, GREEDY, len(PROMPT))


def test_presence_and_frequency_penalties_count_only_the_answer(
    harness: DraftModelHarness, reference: ReferenceModel
) -> None:
    tokens = (*PROMPT, 3, 3, 12)
    drafted = harness.propose(first_row(tokens, sampling=PENALISED, prompt_len=len(PROMPT)))[0].tree
    assert drafted == TokenTree.chain(reference.continued(tokens, 8, PENALISED, len(PROMPT)))


def test_after_a_rejection_the_accepted_tokens_are_not_computed_again(
    harness: DraftModelHarness, reference: ReferenceModel
) -> None:
    drafted = harness.propose(first_row(PROMPT))[0].tree
    tokens = [*PROMPT, *drafted.tokens[:3], (drafted.tokens[3] + 1) % tiny.VOCABULARY]
    corrected = harness.propose(next_row(tokens, 4))[0].tree
    assert corrected == TokenTree.chain(reference.continued(tokens, 8, GREEDY, len(PROMPT)))
    assert harness.row_lengths[0] == [1]  # three accepted drafted tokens were stored already


def test_rows_of_different_lengths_and_parameters_do_not_affect_each_other(
    harness: DraftModelHarness, reference: ReferenceModel
) -> None:
    rows = [
        first_row(PROMPT, "a", GREEDY, DraftBudget(5, 8)),
        first_row(PROMPT[:3], "b", SAMPLED, DraftBudget(8, 2)),
        first_row(PROMPT[:1], "c", PENALISED, DraftBudget(0, 8)),
        first_row(PROMPT[2:], "d", PENALISED, DraftBudget(8, 8)),
    ]
    counts = [5, 2, 0, 8]
    proposals = harness.propose(*rows)
    for row, count, proposal in zip(rows, counts, proposals, strict=True):
        assert row.start is not None
        expected = reference.continued(row.new_tokens, count, row.start.sampling, row.start.prompt_len)
        assert (proposal.sequence_id, proposal.base_len) == (row.sequence_id, row.base_len)
        assert proposal.tree == TokenTree.chain(expected)
    assert len(harness.row_lengths) == 8  # one forward pass per depth, for all rows together


def test_long_prompts_are_computed_in_chunks_beside_the_drafts_of_other_rows(
    loaded: LoadedModel, reference: ReferenceModel
) -> None:
    harness = DraftModelHarness(loaded, most_forward_tokens=6)
    proposals = harness.propose(first_row(PROMPT * 4, "long"), first_row(PROMPT[:2], "short"))
    assert max(sum(row_lengths) for row_lengths in harness.row_lengths) <= 6
    assert harness.row_lengths[:2] == [[2, 4], [1, 5]]
    assert proposals[0].tree == TokenTree.chain(reference.continued(PROMPT * 4, 8, GREEDY, 32))
    assert proposals[1].tree == TokenTree.chain(reference.continued(PROMPT[:2], 8, GREEDY, 2))


@pytest.mark.parametrize(("length", "count"), [(CONTEXT - 2, 3), (CONTEXT, 1), (CONTEXT + 1, 0), (CONTEXT + 9, 0)])
def test_drafting_ends_at_the_context_length_of_the_draft_model(
    harness: DraftModelHarness, length: int, count: int
) -> None:
    tokens = [3 + position % 50 for position in range(length)]
    proposal = harness.propose(first_row(tokens))[0]
    assert proposal.fault is None
    assert len(proposal.tree) == count


def test_a_token_outside_the_vocabulary_faults_only_its_row(
    harness: DraftModelHarness, reference: ReferenceModel
) -> None:
    wrong, fine = harness.propose(first_row((1, tiny.VOCABULARY), "wrong"), first_row(PROMPT, "fine"))
    assert wrong.fault is not None and wrong.fault.code is RowFaultCode.INVALID
    assert fine.tree == TokenTree.chain(reference.continued(PROMPT, 8, GREEDY, 8))
