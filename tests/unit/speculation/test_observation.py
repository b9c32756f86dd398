"""What a round shows: the gain of drafts without that of grammars, and what rounds with prompts cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepResult, Verdict, VerifyRow
from cluster.speculation.controller import SpeculationController
from cluster.speculation.observation import DraftTime, Observation, RoundDrafts, RoundRecord, RoundTimes

NAME = SequenceId("s")
CHAIN = TokenTree.chain((10, 11, 12))


def record(
    tree: TokenTree, tokens: tuple[int, ...], *, waited: float = 0.0, forced: int = 0, pending: int = 1
) -> RoundRecord:
    """A round of 0.5 s with one row whose verdict decides `tokens`. A grammar forces `forced` tokens of its tree."""
    row = VerifyRow(NAME, 9, tuple(range(pending)), tree)
    drafts = RoundDrafts(asked=int(waited > 0), waited=waited, forced={NAME: forced} if forced else {})
    return RoundRecord(
        (row,),
        StepResult((Verdict(NAME, 9, tokens, len(tree)),), KvOccupancy(9, 9), 0.3),
        drafts,
        DraftTime(waited, has_asked=waited > 0),
        RoundTimes(plan=1.0, propose=1.0, verify=1.1, commit=1.45, end=1.5),
    )


def test_a_round_knows_its_times_and_its_tokens() -> None:
    found = record(CHAIN, (10, 11, 99), waited=0.1)
    assert (found.seconds, found.step_seconds) == pytest.approx((0.5, 0.35))
    assert (found.tokens, found.useful_tokens, found.committed) == (4, 3, 3)
    assert found.is_drafted
    assert found.is_comparable


@pytest.mark.parametrize(("forced", "gain"), [(2, 2), (3, 1)])
def test_what_a_grammar_forces_is_no_gain_of_the_draft_beside_it(forced: int, gain: int) -> None:
    found = record(CHAIN, (10, 11, 12, 13), waited=0.1, forced=forced)
    assert found.is_drafted
    assert found.is_comparable
    assert found.committed == gain


def test_a_round_with_forced_tokens_alone_is_compared_with_no_other() -> None:
    found = record(CHAIN, (10, 11, 12, 13), forced=3)
    assert not found.is_drafted
    assert not found.is_comparable


def test_a_round_of_one_half_is_compared_with_rounds_of_both() -> None:
    found = record(EMPTY_TREE, (10,))
    half = replace(found, drafts=RoundDrafts(later=1))
    assert (found.deciding, found.is_drafted) == (1, False)
    assert (half.deciding, half.is_drafted, half.is_comparable) == (2, True, True)


def test_a_round_without_drafts_is_comparable() -> None:
    found = record(EMPTY_TREE, (10,))
    assert not found.is_drafted
    assert found.is_comparable


def test_a_round_that_reads_a_prompt_is_compared_with_no_other() -> None:
    found = record(EMPTY_TREE, (10,), waited=0.1, pending=4)
    assert found.reads_prompts
    assert not found.is_comparable
    assert found.useful_tokens == 5


def controller_after(*records: RoundRecord) -> SpeculationController:
    """A controller that has seen the records, and that plain rounds of one row take 0.5 s."""
    controller = SpeculationController(DraftBudget(8, 8))
    for one in (record(EMPTY_TREE, (10,)), *records):
        controller.decide(Observation(present=frozenset(), deciding=(), rows=1, record=one))
    return controller


def test_the_controller_learns_the_time_of_steps_from_comparable_rounds_only() -> None:
    plain = controller_after().is_worth_prefilling
    prompts = controller_after(record(EMPTY_TREE, (10,), pending=4)).is_worth_prefilling
    for seconds in (0.1, 1.0, 10.0):
        assert plain(seconds, 1, 8) == prompts(seconds, 1, 8)


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 0.5), (0.1, 0.4), (0.4, 0.3)])
def test_a_step_that_was_computed_during_the_wait_for_drafts_counts_with_the_targets_own_time(
    waited: float, seconds: float
) -> None:
    """The round takes 0.5 s, and the target needs 0.3 s for its step."""
    found = record(EMPTY_TREE, (10,), waited=waited)
    assert found.computing_seconds == pytest.approx(seconds)
    controller = SpeculationController(DraftBudget(8, 8))
    controller.decide(Observation(present=frozenset(), deciding=(), rows=1, record=found))
    assert controller._step_latency.seconds(1, 1) == pytest.approx(seconds)


def test_equal_observations_give_equal_decisions() -> None:
    records = [record(CHAIN, (10, 11), waited=0.1), record(EMPTY_TREE, (10,)), record(CHAIN, (10,), waited=0.2)] * 20
    first, second = SpeculationController(DraftBudget(8, 8)), SpeculationController(DraftBudget(8, 8))
    for one in records:
        observation = Observation(present=frozenset({NAME}), deciding=(), rows=1, record=one)
        assert first.decide(observation) == second.decide(observation)
    assert first.is_idle == second.is_idle
