"""What rounds brought decides, whatever was predicted of them."""

from __future__ import annotations

import pytest

from cluster.speculation.speedup import FIRST_PAUSE, Ledger


def held_back(ledger: Ledger, rows: int, most: int) -> int:
    """Rounds in a row that are to have no guesses, up to `most`."""
    return next((count for count in range(most) if not ledger.holds_back(rows)), most)


def test_the_first_round_goes_without_so_that_there_is_something_to_compare_with() -> None:
    ledger = Ledger()
    assert ledger.holds_back(4)
    ledger.plain(4, 0.02)
    assert not ledger.holds_back(4)
    assert ledger.holds_back(16)  # of which nothing is known


@pytest.mark.parametrize(("tokens", "seconds"), [(8, 0.05), (4, 0.025), (5, 0.026)])
def test_rounds_that_are_slower_than_plain_ones_stop_the_guessing(tokens: int, seconds: float) -> None:
    ledger = Ledger()
    ledger.plain(4, 0.02)
    for _ in range(30):
        ledger.guessed(4, seconds, tokens)
    assert held_back(ledger, 4, 1000) >= FIRST_PAUSE - 30


def test_the_pause_doubles_while_it_goes_on_not_to_pay_and_is_short_again_once_it_did() -> None:
    def fail() -> int:
        while not ledger.holds_back(1):
            ledger.guessed(1, 0.04, 1)
        return 1 + held_back(ledger, 1, 5000)

    ledger = Ledger()
    ledger.plain(1, 0.02)
    pauses = [fail() for _ in range(3)]
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    for _ in range(40):
        ledger.guessed(1, 0.02, 3)
    assert not ledger.holds_back(1)
    assert fail() == FIRST_PAUSE


def test_guessing_pays_once_several_rounds_were_faster_than_plain_ones() -> None:
    ledger = Ledger()
    for _ in range(10):
        ledger.guessed(1, 0.02, 2)
    assert not ledger.pays(1)  # there is nothing to compare with
    ledger.plain(1, 0.02)
    assert ledger.pays(1)
    assert not ledger.pays(8)
    for _ in range(5):
        ledger.guessed(8, 0.02, 16)
    ledger.plain(8, 0.02)
    assert not ledger.pays(8)  # five rounds tell too little
    for _ in range(60):
        ledger.guessed(1, 0.03, 1)
    assert not ledger.pays(1)


def test_what_does_not_pay_for_few_does_not_for_more_while_fewer_go_on() -> None:
    ledger = Ledger()
    for rows in (1, 8, 16):
        ledger.plain(rows, 0.02)
    for _ in range(20):
        ledger.guessed(1, 0.025, 2)
        ledger.guessed(8, 0.05, 10)
    assert not ledger.holds_back(1)
    assert ledger.holds_back(8)
    assert ledger.holds_back(16)
