"""The acceptance model: rates by depth, calibration of the drafter, and the history of each sequence."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.drafting import DraftBudget
from cluster.core.tree import TokenTree
from cluster.speculation.acceptance import (
    AcceptanceCurve,
    AcceptanceModel,
    HitRate,
    SequenceAcceptance,
    observe_tree,
    observe_verdict,
    path_probabilities,
)

CHAIN = TokenTree.chain([1, 2, 3, 4])
BUSH = TokenTree((1, 2, 3, 4), (-1, -1, 0, 0))


def simulate(
    rng: random.Random,
    rounds: int,
    acceptance: float,
    stated: float | None,
    model: AcceptanceModel,
    record: SequenceAcceptance,
) -> tuple[AcceptanceModel, SequenceAcceptance]:
    """Learn from chains of four that are right with probability `acceptance`; the drafter sends `stated` per token."""
    probabilities = () if stated is None else tuple(stated**depth for depth in range(1, 5))
    for _ in range(rounds):
        right = next((depth for depth in range(4) if rng.random() >= acceptance), 4)
        decided = [*range(1, right + 1), 99]
        conditionals = model.conditionals(CHAIN, probabilities)
        values = path_probabilities(CHAIN, conditionals, record)
        model, record = observe_tree(model, record, CHAIN, values, 4)
        model, record = observe_verdict(
            model, record, CHAIN, conditionals, decided, has_probabilities=stated is not None
        )
    return model, record


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("stated", [None, 0.3, 0.7])
def test_probabilities_are_learned_whatever_the_drafter_estimates(acceptance: float, stated: float | None) -> None:
    model, record = simulate(random.Random(3), 600, acceptance, stated, AcceptanceModel(), SequenceAcceptance())
    probabilities = () if stated is None else tuple(stated**depth for depth in range(1, 5))
    values = path_probabilities(CHAIN, model.conditionals(CHAIN, probabilities), record)
    assert values[0] == pytest.approx(acceptance, abs=0.15)
    assert model.curve.probabilities[0] == pytest.approx(acceptance, abs=0.15)


def test_a_sequence_unlike_the_others_is_learned_within_a_few_rounds() -> None:
    rng = random.Random(5)
    model, _ = simulate(rng, 300, 0.2, None, AcceptanceModel(), SequenceAcceptance())
    before = path_probabilities(CHAIN, model.conditionals(CHAIN, ()), SequenceAcceptance())[0]
    model, record = simulate(rng, 10, 1.0, None, model, SequenceAcceptance())
    after = path_probabilities(CHAIN, model.conditionals(CHAIN, ()), record)[0]
    assert before < 0.35
    assert after > 2 * before
    assert record.curve.combined(model.curve, 3.0, 1)[0] > 1.2 * before


def test_the_probability_of_a_node_is_the_product_along_its_path() -> None:
    model = AcceptanceModel(calibration=HitRate(100.0, 100.0))
    values = path_probabilities(BUSH, model.conditionals(BUSH, (0.6, 0.2, 0.3, 0.1)), SequenceAcceptance())
    assert values == pytest.approx([0.6, 0.2, 0.3, 0.1])


def test_the_second_of_two_siblings_has_a_rate_of_its_own() -> None:
    model = AcceptanceModel()
    for _ in range(300):
        conditionals = model.conditionals(BUSH, ())
        model, _ = observe_verdict(model, SequenceAcceptance(), BUSH, conditionals, [2, 9], has_probabilities=False)
    first, second, *_ = model.conditionals(BUSH, ())
    assert first < 0.05 < 0.9 < second


def test_only_what_was_decided_counts() -> None:
    model = AcceptanceModel()
    conditionals = model.conditionals(CHAIN, ())
    after, record = observe_verdict(model, SequenceAcceptance(), CHAIN, conditionals, [1, 2], has_probabilities=False)
    assert [new != old for new, old in zip(after.rates, model.rates, strict=True)].count(True) == 2
    assert record.hits.hits > 1.9
    unchanged, same = observe_verdict(model, SequenceAcceptance(), TokenTree(), [], [1, 2], has_probabilities=False)
    assert (unchanged, same) == (model, SequenceAcceptance())


# --- the curve ----------------------------------------------------------------------------------


def test_a_missing_tree_counts_as_zero() -> None:
    curve = AcceptanceCurve().observed([0.8, 0.6], [1, 2], 2, 100.0).observed([], [], 2, 100.0)
    assert curve.probabilities == pytest.approx((0.4, 0.3))
    assert curve.depth_of(2) == 2


def test_nodes_that_were_not_asked_for_do_not_count_as_missing() -> None:
    curve = AcceptanceCurve().observed([0.8, 0.6, 0.5], [1, 2, 3], 3, 100.0)
    for _ in range(50):
        curve = curve.observed([0.2], [1], 1, 100.0)
    assert curve.probabilities[0] == pytest.approx(0.2, abs=0.05)
    assert curve.probabilities[1:] == (0.6, 0.5)


def test_a_shallow_budget_shows_the_shallow_nodes_only() -> None:
    curve = AcceptanceCurve().observed([0.9, 0.8, 0.7, 0.6], [1, 1, 2, 3], 4, 100.0)
    assert [curve.nodes_within(DraftBudget(4, depth)) for depth in (0, 1, 2, 3, 9)] == [0, 2, 3, 4, 4]


def test_a_curve_keeps_falling_beyond_what_was_observed() -> None:
    curve = AcceptanceCurve()
    for _ in range(20):
        curve = curve.observed([0.8, 0.64], [1, 2], 2, 100.0)
    expected = AcceptanceCurve().combined(curve, 3.0, 4)
    assert expected == pytest.approx((0.8, 0.64, 0.512, 0.41), abs=0.05)


values = st.lists(st.floats(0, 1), max_size=8).map(lambda some: sorted(some, reverse=True))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(values, st.integers(0, 8)), max_size=20), st.lists(values, max_size=5))
def test_expected_probabilities_never_rise_and_stay_within_0_and_1(
    history: list[tuple[list[float], int]], own: list[list[float]]
) -> None:
    curve, mine = AcceptanceCurve(), AcceptanceCurve()
    for some, asked in history:
        curve = curve.observed(some[:asked], list(range(1, len(some[:asked]) + 1)), asked, 50.0)
    for some in own:
        mine = mine.observed(some, list(range(1, len(some) + 1)), 8, 8.0)
    expected = mine.combined(curve, 3.0, 12)
    assert all(0 <= after <= before <= 1 for before, after in itertools.pairwise(expected))
    assert len(expected) == 12
