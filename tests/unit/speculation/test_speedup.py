"""The measured speed-up suspends and resumes speculation, regardless of the prediction."""

from __future__ import annotations

import pytest

from cluster.speculation.constants import CLEAR_ROUNDS, FIRST_CONTROL_ROUNDS, FIRST_PAUSE, LOSS_SHARE
from cluster.speculation.speedup import SpeedupTracker


def held_back(tracker: SpeedupTracker, rows: int, most: int) -> int:
    """Rounds in a row without drafts, up to `most`."""
    return next((count for count in range(most) if not tracker.suspends(rows)), most)


def test_the_first_round_has_no_drafts_to_measure_plain_decoding() -> None:
    tracker = SpeedupTracker()
    assert tracker.suspends(4)
    tracker.observe_plain(4, 0.02)
    assert not tracker.suspends(4)
    assert tracker.suspends(16)  # nothing is known of this batch size


def test_a_first_round_that_something_delayed_does_not_make_drafts_look_fast() -> None:
    tracker = SpeedupTracker()
    tracker.observe_plain(8, 0.05, expected_seconds=0.02)
    for _ in range(CLEAR_ROUNDS):
        tracker.observe_drafted(8, 0.045, 8)
    assert tracker.suspends(8)


def test_rounds_without_drafts_become_rarer_while_speculation_goes_on() -> None:
    tracker = SpeedupTracker()
    longest = 4 * FIRST_CONTROL_ROUNDS
    assert [count for count in range(1, 90) if tracker.controls(4, longest, 2)] == [7, 8, 23, 24, 55, 56, 87, 88]
    assert [count for count in range(1, 70) if tracker.controls(1, longest, 1)] == [31, 63]


@pytest.mark.parametrize(("tokens", "seconds"), [(8, 0.05), (4, 0.025), (5, 0.026)])
def test_speculation_is_suspended_when_it_is_slower_than_plain_decoding(tokens: int, seconds: float) -> None:
    tracker = SpeedupTracker()
    tracker.observe_plain(4, 0.02)
    for _ in range(30):
        tracker.observe_drafted(4, seconds, tokens)
    assert held_back(tracker, 4, 1000) >= FIRST_PAUSE - 30


def test_the_pause_doubles_while_drafts_do_not_pay_and_is_short_again_once_they_did() -> None:
    def fail() -> int:
        while not tracker.suspends(1):
            tracker.observe_drafted(1, 0.0225, 1)
        return 1 + held_back(tracker, 1, 5000)

    tracker = SpeedupTracker()
    tracker.observe_plain(1, 0.02)
    pauses = [fail() for _ in range(3)]
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    for _ in range(40):
        tracker.observe_drafted(1, 0.02, 3)
    assert not tracker.suspends(1)
    assert fail() == FIRST_PAUSE


def test_a_pause_makes_up_for_the_time_that_was_lost() -> None:
    tracker = SpeedupTracker()
    plain, drafted, total = 0.02, 0.08, 0.0
    lost = 0.0
    for _ in range(20_000):
        if tracker.suspends(1):
            tracker.observe_plain(1, plain)
            total += plain
        else:
            tracker.observe_drafted(1, drafted, 1)
            lost += drafted - plain
            total += drafted
    assert 0.0 < lost <= 1.1 * LOSS_SHARE * total


def test_drafts_pay_once_several_rounds_were_faster_than_plain_ones() -> None:
    tracker = SpeedupTracker()
    for _ in range(10):
        tracker.observe_drafted(1, 0.02, 2)
    assert not tracker.pays(1)  # no plain round was measured
    tracker.observe_plain(1, 0.02)
    assert tracker.pays(1)
    assert not tracker.pays(8)
    for _ in range(5):
        tracker.observe_drafted(8, 0.02, 16)
    tracker.observe_plain(8, 0.02)
    assert not tracker.pays(8)  # five rounds are too few
    for _ in range(60):
        tracker.observe_drafted(1, 0.03, 1)
    assert not tracker.pays(1)


def test_a_suspension_covers_larger_batches_and_not_smaller_ones() -> None:
    tracker = SpeedupTracker()
    for rows in (1, 8, 16):
        tracker.observe_plain(rows, 0.02)
    for _ in range(20):
        tracker.observe_drafted(1, 0.025, 2)
        tracker.observe_drafted(8, 0.05, 10)
    assert not tracker.suspends(1)
    assert tracker.suspends(8)
    assert tracker.suspends(16)


def test_a_suspension_ends_for_other_sequences_once_its_lost_time_is_made_up_for() -> None:
    tracker = SpeedupTracker()
    tracker.observe_plain(1, 0.02)
    while not tracker.suspends(1):
        tracker.observe_drafted(1, 0.0225, 1)
    lost_rounds = 6 * 0.125  # until the loss is clear
    assert not tracker.renew(1)
    for _ in range(int(lost_rounds / LOSS_SHARE) + 1):
        tracker.observe_plain(1, 0.02)
    assert tracker.suspends(1)  # the pause is longer
    assert tracker.renew(1)
    assert not tracker.suspends(1)


def test_time_lost_beside_compared_rounds_is_owed_and_gains_make_up_for_it() -> None:
    tracker = SpeedupTracker()
    tracker.observe_plain(1, 0.02)
    assert tracker.renew(1)
    tracker.observe_lost(1, 0.02)
    assert not tracker.renew(1)
    tracker.observe_drafted(1, 0.02, 2)  # one round saved
    assert tracker.renew(1)
