"""What rounds brought decides, whatever was predicted of them."""

from __future__ import annotations

import pytest

from cluster.speculation.speedup import FIRST_PAUSE, SpeedupTracker


def held_back(tracker: SpeedupTracker, rows: int, most: int) -> int:
    """Rounds in a row that are to have no guesses, up to `most`."""
    return next((count for count in range(most) if not tracker.suspends(rows)), most)


def test_the_first_round_goes_without_so_that_there_is_something_to_compare_with() -> None:
    tracker = SpeedupTracker()
    assert tracker.suspends(4)
    tracker.observe_plain(4, 0.02)
    assert not tracker.suspends(4)
    assert tracker.suspends(16)  # of which nothing is known


@pytest.mark.parametrize(("tokens", "seconds"), [(8, 0.05), (4, 0.025), (5, 0.026)])
def test_rounds_that_are_slower_than_plain_ones_stop_the_guessing(tokens: int, seconds: float) -> None:
    tracker = SpeedupTracker()
    tracker.observe_plain(4, 0.02)
    for _ in range(30):
        tracker.observe_drafted(4, seconds, tokens)
    assert held_back(tracker, 4, 1000) >= FIRST_PAUSE - 30


def test_the_pause_doubles_while_it_goes_on_not_to_pay_and_is_short_again_once_it_did() -> None:
    def fail() -> int:
        while not tracker.suspends(1):
            tracker.observe_drafted(1, 0.04, 1)
        return 1 + held_back(tracker, 1, 5000)

    tracker = SpeedupTracker()
    tracker.observe_plain(1, 0.02)
    pauses = [fail() for _ in range(3)]
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    for _ in range(40):
        tracker.observe_drafted(1, 0.02, 3)
    assert not tracker.suspends(1)
    assert fail() == FIRST_PAUSE


def test_guessing_pays_once_several_rounds_were_faster_than_plain_ones() -> None:
    tracker = SpeedupTracker()
    for _ in range(10):
        tracker.observe_drafted(1, 0.02, 2)
    assert not tracker.pays(1)  # there is nothing to compare with
    tracker.observe_plain(1, 0.02)
    assert tracker.pays(1)
    assert not tracker.pays(8)
    for _ in range(5):
        tracker.observe_drafted(8, 0.02, 16)
    tracker.observe_plain(8, 0.02)
    assert not tracker.pays(8)  # five rounds tell too little
    for _ in range(60):
        tracker.observe_drafted(1, 0.03, 1)
    assert not tracker.pays(1)


def test_what_does_not_pay_for_few_does_not_for_more_while_fewer_go_on() -> None:
    tracker = SpeedupTracker()
    for rows in (1, 8, 16):
        tracker.observe_plain(rows, 0.02)
    for _ in range(20):
        tracker.observe_drafted(1, 0.025, 2)
        tracker.observe_drafted(8, 0.05, 10)
    assert not tracker.suspends(1)
    assert tracker.suspends(8)
    assert tracker.suspends(16)
