"""What a draft's confidence is worth is learned from what the target takes; and what a pass is worth from the clock."""

from __future__ import annotations

import pytest

from workers.draft.expansion.calibration import KINDS, TRUST, Calibration
from workers.draft.expansion.pass_gain import Pace

GREEDY = KINDS[True, False]


def taught(confidences: list[float], right: list[int | None], times: int) -> Calibration:
    calibration = Calibration()
    for _ in range(times):
        for taken in right:
            calibration.observe(confidences, taken, GREEDY)
    return calibration


def test_before_anything_is_known_guesses_are_trusted_somewhat_less_than_they_trust_themselves() -> None:
    assert Calibration().chances([0.5, 0.2], GREEDY) == pytest.approx([TRUST * 0.5, TRUST * 0.2])
    assert Calibration(trust=1.0).chances([0.7], GREEDY) == pytest.approx([0.7])


@pytest.mark.parametrize(("right", "first", "second"), [([0], 1.0, 0.0), ([1], 0.0, 1.0), ([None], 0.0, 0.0)])
def test_what_always_happens_is_expected(right: list[int | None], first: float, second: float) -> None:
    chances = taught([0.5, 0.3], right, 300).chances([0.5, 0.3], GREEDY)
    assert chances == pytest.approx([first, second], abs=0.06)


def test_rates_are_learned_for_each_rank() -> None:
    chances = taught([0.6, 0.3, 0.1], [0, 0, 0, 1, None], 100).chances([0.6, 0.3, 0.1], GREEDY)
    assert chances == pytest.approx([0.6, 0.2, 0.0], abs=0.03)


def test_few_commits_teach_something_about_guesses_of_another_confidence() -> None:
    chances = taught([0.3], [0], 10).chances([0.6], GREEDY)
    assert chances[0] > 0.9


def test_siblings_never_have_more_than_the_whole_chance() -> None:
    calibration = taught([0.9, 0.9], [0], 50)
    for _ in range(50):
        calibration.observe([0.1, 0.1], 1, GREEDY)
    chances = calibration.chances([0.9, 0.1, 0.9, 0.9, 0.9], GREEDY)
    assert sum(chances) <= 1.0 + 1e-9
    assert all(0.0 <= chance <= 1.0 for chance in chances)


def test_what_was_long_ago_fades() -> None:
    calibration = taught([0.5], [0], 2000)
    for _ in range(1500):
        calibration.observe([0.5], None, GREEDY)
    assert calibration.chances([0.5], GREEDY)[0] < 0.1
    assert calibration.hope(GREEDY) < 0.01


def test_greedy_and_drawn_tokens_teach_nothing_about_each_other() -> None:
    calibration = taught([0.5], [None], 100)
    for kind in (KINDS[False, False], KINDS[False, True], KINDS[True, True]):
        assert calibration.chances([0.5], kind) == pytest.approx([TRUST * 0.5])
        assert calibration.hope(kind) == Calibration().hope(kind)


# --- pace -------------------------------------------------------------------------------------


def paced(tokens_per_second: float, pass_seconds: float) -> Pace:
    pace = Pace()
    for _ in range(5):
        pace.note_commit(2, 2 / tokens_per_second)
        pace.note_pass(pass_seconds)
    return pace


def test_a_pass_is_worth_it_when_tokens_come_faster_with_it_than_without() -> None:
    pace = paced(tokens_per_second=100, pass_seconds=0.002)  # in which every sequence grows by 0.2 tokens
    assert pace.is_worth(0.21, rows=1)
    assert not pace.is_worth(0.19, rows=1)


def test_every_row_of_the_round_waits_for_the_pass() -> None:
    pace = paced(tokens_per_second=100, pass_seconds=0.002)
    assert pace.is_worth(0.81, rows=4)
    assert not pace.is_worth(0.79, rows=4)


def test_before_anything_is_measured_all_but_nothing_is_worth_a_pass() -> None:
    assert Pace().is_worth(0.05, rows=8)
    assert not Pace().is_worth(0.01, rows=1)


def test_a_sequence_that_was_away_tells_nothing() -> None:
    pace = paced(tokens_per_second=100, pass_seconds=0.002)
    for _ in range(100):
        pace.note_commit(1, 30.0)
    assert not pace.is_worth(0.19, rows=1)
