"""Successors of contexts: longer contexts first, at most so many, and none of a context that is not known."""

from __future__ import annotations

from workers.draft.lookup.successors import ContextSuccessors


def test_a_context_has_at_most_so_many_tokens() -> None:
    contexts = ContextSuccessors(3, 4)
    assert contexts.before([1, 2, 3, 4, 5], 4) == (2, 3, 4)
    assert contexts.before([1, 2, 3, 4, 5], 1) == (1,)


def test_successors_of_the_longest_known_end_come_first() -> None:
    contexts = ContextSuccessors(3, 4)
    contexts.add((1, 2, 3), 10)
    contexts.add((7, 2, 3), 11)
    contexts.add((3,), 12)
    assert contexts.after((1, 2, 3))[:2] == (3, [10, 11, 12])
    assert contexts.after((8, 2, 3))[:2] == (2, [11, 10, 12])
    assert contexts.after((8, 9, 3))[:2] == (1, [12, 11, 10])
    assert contexts.after((1, 2, 4))[:2] == (0, [])


def test_other_successors_fill_the_list_and_none_comes_twice() -> None:
    contexts = ContextSuccessors(2, 3)
    contexts.add((1,), 10)
    assert contexts.after((1,), [10, 20, 30, 40]) == (1, [10, 20, 30], 1)
    assert contexts.after((2,), [20])[:2] == (0, [20])


def test_ranked_successors_replace_earlier_ones_and_keep_to_the_width() -> None:
    contexts = ContextSuccessors(2, 2)
    contexts.add((1, 2), 10)
    contexts.replace((1, 2), [20, 21, 22])
    assert contexts.after((1, 2))[:2] == contexts.after((1, 2), [5])[:2] == (2, [20, 21])
    contexts.add((1, 2), 30)
    assert contexts.after((1, 2))[:2] == (2, [30, 20])
