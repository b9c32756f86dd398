"""Acceptance probabilities are learned from decisions of the target, and the cost of a pass from measured times."""

from __future__ import annotations

import pytest

from workers.draft.common.trees.calibration import KINDS, PRIOR_TRUST, Calibration
from workers.draft.common.trees.pass_cost import PassCost

GREEDY = KINDS[True, False]


def observed(confidences: list[float], right: list[int | None], times: int) -> Calibration:
    calibration = Calibration()
    for _ in range(times):
        for taken in right:
            calibration.observe(confidences, taken, GREEDY)
    return calibration


def test_before_any_observation_probabilities_are_somewhat_below_the_confidences() -> None:
    assert Calibration().probabilities([0.5, 0.2], GREEDY) == pytest.approx([PRIOR_TRUST * 0.5, PRIOR_TRUST * 0.2])
    assert Calibration(trust=1.0).probabilities([0.7], GREEDY) == pytest.approx([0.7])


@pytest.mark.parametrize(("right", "first", "second"), [([0], 1.0, 0.0), ([1], 0.0, 1.0), ([None], 0.0, 0.0)])
def test_the_probability_of_tokens_that_are_always_accepted_approaches_one(
    right: list[int | None], first: float, second: float
) -> None:
    probabilities = observed([0.5, 0.3], right, 300).probabilities([0.5, 0.3], GREEDY)
    assert probabilities == pytest.approx([first, second], abs=0.06)


def test_rates_are_learned_for_each_rank() -> None:
    probabilities = observed([0.6, 0.3, 0.1], [0, 0, 0, 1, None], 100).probabilities([0.6, 0.3, 0.1], GREEDY)
    assert probabilities == pytest.approx([0.6, 0.2, 0.0], abs=0.03)


def test_a_few_observations_also_change_other_bins_of_confidence() -> None:
    probabilities = observed([0.3], [0], 10).probabilities([0.6], GREEDY)
    assert probabilities[0] > 0.9


def test_probabilities_of_siblings_sum_to_at_most_one() -> None:
    calibration = observed([0.9, 0.9], [0], 50)
    for _ in range(50):
        calibration.observe([0.1, 0.1], 1, GREEDY)
    probabilities = calibration.probabilities([0.9, 0.1, 0.9, 0.9, 0.9], GREEDY)
    assert sum(probabilities) <= 1.0 + 1e-9
    assert all(0.0 <= probability <= 1.0 for probability in probabilities)


def test_old_observations_decay() -> None:
    calibration = observed([0.5], [0], 2000)
    for _ in range(1500):
        calibration.observe([0.5], None, GREEDY)
    assert calibration.probabilities([0.5], GREEDY)[0] < 0.1
    assert calibration.first_rate(GREEDY) < 0.01


def test_greedy_and_sampled_decoding_are_calibrated_separately() -> None:
    calibration = observed([0.5], [None], 100)
    for kind in (KINDS[False, False], KINDS[False, True], KINDS[True, True]):
        assert calibration.probabilities([0.5], kind) == pytest.approx([PRIOR_TRUST * 0.5])
        assert calibration.first_rate(kind) == Calibration().first_rate(kind)


# --- the cost of a pass ------------------------------------------------------------------------


def measured(tokens_per_second: float, pass_seconds: float) -> PassCost:
    cost = PassCost()
    for _ in range(5):
        cost.record_commit(2, 2 / tokens_per_second)
        cost.record_pass(pass_seconds)
    return cost


def test_a_pass_is_worthwhile_when_it_adds_tokens_faster_than_the_target_commits_them() -> None:
    cost = measured(tokens_per_second=100, pass_seconds=0.002)  # each sequence gains 0.2 tokens during a pass
    assert cost.is_worthwhile(0.21, rows=1)
    assert not cost.is_worthwhile(0.19, rows=1)


def test_a_pass_must_pay_for_every_row_of_the_round() -> None:
    cost = measured(tokens_per_second=100, pass_seconds=0.002)
    assert cost.is_worthwhile(0.81, rows=4)
    assert not cost.is_worthwhile(0.79, rows=4)


def test_before_any_measurement_every_pass_with_some_gain_is_worthwhile() -> None:
    assert PassCost().is_worthwhile(0.05, rows=8)
    assert not PassCost().is_worthwhile(0.01, rows=1)


def test_long_gaps_between_calls_are_not_counted() -> None:
    cost = measured(tokens_per_second=100, pass_seconds=0.002)
    for _ in range(100):
        cost.record_commit(1, 30.0)
    assert not cost.is_worthwhile(0.19, rows=1)
