"""The drafter that draws at random: fixed shapes, stated distributions, new numbers per round, and its memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal, RowFaultCode
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import GenerationRequest, SamplingParameters, SequenceStart, StoppingCriteria
from cluster.core.sequence import DraftRequest, Sequence
from cluster.speculation.acceptance import AcceptanceModel, HitRate
from cluster.speculation.estimator import AcceptanceEstimator
from cluster.wire.codec.proposal import decode_distributions, encode_distributions
from tests.support.models import tiny
from workers.draft.model.drawing_drafter import DrawingDrafter
from workers.draft.model.model_expander import ModelExpander
from workers.draft.model.token_drawer import MOST_TOKENS, TokenDrawer
from workers.forward.loaded_model import LoadedModel
from workers.kv.pool import KvPool
from workers.model.loading import load_model

PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)
SAMPLED = SamplingParameters(temperature=0.9, seed=7)
GREEDY = SamplingParameters(temperature=0.0)
BUDGET = DraftBudget(8, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tiny.save(tmp_path_factory.mktemp("drawing"), tiny.llama(), sharpness=1.5)
    return load_model(ModelSection(path=str(directory), device="cpu"))


def drafter_over(
    loaded: LoadedModel, siblings: int = 3, blocks: int = 64, most_forward_tokens: int = 512, limit: int | None = None
) -> tuple[DrawingDrafter, KvPool]:
    pool = KvPool(loaded.kv_spec, KvSection(block_size=4), blocks=blocks, truncatable=True)
    drawer = TokenDrawer(ModelExpander(loaded, pool, 1), limit)
    return DrawingDrafter(drawer, DraftSection(max_nodes=16, max_depth=8), siblings, most_forward_tokens), pool


def row(name: str = "a", sampling: SamplingParameters = SAMPLED, budget: DraftBudget = BUDGET) -> DraftRow:
    return DraftRow(SequenceId(name), len(PROMPT), PROMPT, budget, SequenceStart(len(PROMPT), sampling))


def propose(drafter: DrawingDrafter, *rows: DraftRow) -> tuple[Proposal, ...]:
    return drafter.propose(rows)


def test_the_shape_depends_on_the_budget_alone(loaded: LoadedModel) -> None:
    drafter, _ = drafter_over(loaded)
    rows = [row(str(seed), replace(SAMPLED, seed=seed)) for seed in range(8)]
    proposals = propose(drafter, *rows)
    assert {proposal.tree.parents for proposal in proposals} == {(-1, -1, -1, 0, 0, 0, 3, 3)}
    assert len({proposal.tree.tokens for proposal in proposals}) > 1
    assert all(proposal.probabilities == () for proposal in proposals)


@pytest.mark.parametrize("budget", [DraftBudget(0, 0), DraftBudget(5, 1), DraftBudget(2, 8), DraftBudget(16, 3)])
def test_trees_stay_within_the_budget(loaded: LoadedModel, budget: DraftBudget) -> None:
    tree = propose(drafter_over(loaded)[0], row(budget=budget))[0].tree
    assert len(tree) <= budget.max_nodes
    assert tree.depth() <= budget.max_depth
    assert bool(tree) == bool(budget.max_nodes)


def test_siblings_share_a_truncated_distribution_that_holds_them(loaded: LoadedModel) -> None:
    proposal = propose(drafter_over(loaded)[0], row())[0]
    for token, stated in zip(proposal.tree.tokens, proposal.distributions, strict=True):
        assert token in stated.tokens
        assert len(stated.tokens) == MOST_TOKENS
        assert math.isclose(sum(stated.probabilities), 1.0, rel_tol=1e-6)
    assert len(set(proposal.distributions[:3])) == 1


def test_messages_change_no_distribution(loaded: LoadedModel) -> None:
    """Else a target would not know the rows that bring its own draft, and compute them anew."""
    proposal = propose(drafter_over(loaded)[0], row())[0]
    message = encode_distributions(proposal.distributions)
    assert decode_distributions(message, proposal.tree, "row.distributions") == proposal.distributions


def test_greedy_drafts_are_the_most_probable_tokens_and_state_no_distribution(loaded: LoadedModel) -> None:
    first, other = propose(drafter_over(loaded)[0], row("a", GREEDY), row("b", replace(GREEDY, seed=3)))
    assert first.tree == other.tree
    assert len(first.tree) == BUDGET.max_nodes
    assert first.distributions == ()


def test_a_repeated_row_repeats_the_draft_and_a_new_round_draws_new_numbers(loaded: LoadedModel) -> None:
    drafter, _ = drafter_over(loaded)
    first = propose(drafter, row())[0]
    assert propose(drafter, row())[0] == first
    token = first.tree.tokens[0]
    follow = propose(drafter, DraftRow(SequenceId("a"), len(PROMPT) + 1, (token,), BUDGET))[0]
    below = [first.tree.tokens[node] for node in first.tree.children(0)]
    assert [follow.tree.tokens[node] for node in follow.tree.children(-1)] != below
    assert follow.distributions[0].tokens == first.distributions[3].tokens  # the same context


def test_a_batch_changes_no_draft(loaded: LoadedModel) -> None:
    together = propose(drafter_over(loaded)[0], row("a"), row("b", replace(SAMPLED, seed=8)))
    assert propose(drafter_over(loaded)[0], row("a"))[0].tree == together[0].tree


def test_a_prompt_in_chunks_or_computed_before_changes_no_draft(loaded: LoadedModel) -> None:
    expected = propose(drafter_over(loaded)[0], row())[0].tree
    assert propose(drafter_over(loaded, most_forward_tokens=3)[0], row())[0].tree == expected
    drafter, _ = drafter_over(loaded)
    propose(drafter, row(budget=DraftBudget(0, 0)))
    while drafter.catch_up([SequenceId("a")]):
        pass
    assert propose(drafter, row())[0].tree == expected
    assert not drafter.run_ahead()


def test_release_frees_everything(loaded: LoadedModel) -> None:
    drafter, pool = drafter_over(loaded)
    propose(drafter, row("a"), row("b"))
    assert pool.blocks_free < pool.blocks_total
    drafter.release([SequenceId("a"), SequenceId("b"), SequenceId("unknown")])
    assert pool.blocks_free == pool.blocks_total


def test_a_full_memory_evicts_idle_sequences_and_otherwise_leaves_a_draft_out(loaded: LoadedModel) -> None:
    drafter, _ = drafter_over(loaded, blocks=3)
    assert propose(drafter, row("a"))[0].tree
    assert propose(drafter, row("b"))[0].tree
    assert [bool(proposal.tree) for proposal in propose(drafter, row("c"), row("d"))].count(True) == 1


def test_an_unknown_sequence_is_out_of_sync(loaded: LoadedModel) -> None:
    proposal = propose(drafter_over(loaded)[0], DraftRow(SequenceId("a"), 9, (3,), BUDGET))[0]
    assert proposal.fault is not None
    assert proposal.fault.code is RowFaultCode.OUT_OF_SYNC


def test_no_token_beyond_the_targets_vocabulary_is_drawn(loaded: LoadedModel) -> None:
    proposal = propose(drafter_over(loaded, limit=10)[0], row())[0]
    assert max(proposal.tree.tokens) < 10
    assert max(token for stated in proposal.distributions for token in stated.tokens) < 10


def test_the_coordinator_leaves_out_drawn_siblings_from_the_last_one_on(loaded: LoadedModel) -> None:
    """Even if the second sibling was accepted more often than the first one."""
    proposal = propose(drafter_over(loaded)[0], row())[0]
    estimator = AcceptanceEstimator()
    estimator._model = AcceptanceModel(rates=(HitRate(0.1, 1.0), HitRate(0.6, 1.0)) * 32)
    generation = GenerationRequest(RequestId("r"), PROMPT, SAMPLED, StoppingCriteria(8))
    request = DraftRequest(Sequence(SequenceId("a"), generation, 0), BUDGET)
    drawn = estimator.estimate(request, proposal).probabilities
    assert drawn[0] >= drawn[1] >= drawn[2]
    ranked = estimator.estimate(request, replace(proposal, distributions=())).probabilities
    assert ranked[0] < ranked[1]
