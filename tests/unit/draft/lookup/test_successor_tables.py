"""Tables of successors: rows grow with the tokens, and each salt has its own table."""

from __future__ import annotations

import numpy as np
import pytest

from workers.draft.lookup.successors import RankRates, Successors, SuccessorTables


def test_a_row_has_the_newest_successors_and_at_most_as_many_as_the_table_is_wide() -> None:
    table = Successors(3)
    assert table.after(5) == []
    table.add(5, 7)
    table.add(5, 8)
    table.add(5, 7)
    assert table.after(5) == [8, 7]
    table.replace(5, [1, 2, 3, 4])
    assert table.after(5) == [1, 2, 3]
    table.add(5, 9)
    assert table.after(5) == [9, 1, 2]
    table.replace(5, [6])
    assert table.after(5) == [6]


def test_any_token_of_a_vocabulary_has_a_row_and_absurd_ones_have_none() -> None:
    table = Successors(2)
    for token in (0, 3000, 200_000):
        table.add(token, 4)
        assert table.after(token) == [4]
    table.add(1 << 30, 4)
    assert table.after(1 << 30) == []


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_table_has_the_given_rows_and_learns_those_of_other_tokens(width: int) -> None:
    given = np.array([[3, 4], [-1, -1]], dtype=np.int32)
    tables = SuccessorTables(width, 4, given)
    one, other = tables.of("one"), tables.of("other")
    for token in (0, 1, 2):
        one.add(token, 9)
        one.replace(token, [9, 8])
    assert [one.after(token) for token in (0, 1, 2)] == [[3, 4][:width], [9, 8][:width], [9, 8][:width]]
    assert [other.after(token) for token in (0, 1, 2)] == [[3, 4][:width], [], []]
    assert given.tolist() == [[3, 4], [-1, -1]]


def test_the_least_recently_used_salt_is_evicted() -> None:
    tables = SuccessorTables(2, 2)
    for salt in ("a", "b"):
        tables.of(salt).add(1, 2)
    tables.of("a")
    tables.of("c")
    assert tables.salts == ("a", "c")
    assert tables.of("a").after(1) == [2]
    assert tables.of("b").after(1) == []


def test_rates_approach_the_observed_ones() -> None:
    rates = RankRates(2)
    assert rates[0] > rates[1] > 0
    assert RankRates(2, 3)[0] == RankRates(2, 8)[0] > RankRates(2, 2)[0] > rates[0]
    for _ in range(1000):
        rates.observe([4, 5], 5)
    assert rates[0] < 0.01
    assert rates[1] > 0.99
