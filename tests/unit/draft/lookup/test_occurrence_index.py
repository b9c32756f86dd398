"""The index finds what a scan of the text finds, after any additions, cuts and evictions."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from workers.draft.lookup.occurrence_index import SEPARATOR, OccurrenceIndex

LONGEST = 6
texts = st.lists(st.integers(0, 2), max_size=12)


def scan(tokens: Sequence[int], context: Sequence[int], shortest: int) -> dict[int, int]:
    """Position and length of every match of at least `shortest` tokens before the end of the text."""
    found = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, len(context)) and tokens[end - 1 - length] == context[-1 - length]:
            length += 1
        if length >= shortest:
            found[end] = length
    return found


@given(st.lists(st.tuples(st.integers(0, 6), texts), min_size=1, max_size=8), st.integers(1, 3))
def test_after_any_edits_all_occurrences_are_found(edits: list[tuple[int, list[int]]], shortest: int) -> None:
    index = OccurrenceIndex([], shortest, LONGEST)
    expected: list[int] = []
    for removed, added in edits:
        length = max(0, len(expected) - removed)
        expected[length:] = added
        index.cut(length)
        index.extend(added)
        context = expected[-LONGEST:]
        assert index.tokens == expected
        assert index.find(context, 1000) == scan(expected, context, shortest)


@given(st.lists(texts, min_size=1, max_size=8), st.integers(0, 8), texts)
def test_after_evictions_the_remaining_texts_are_found(
    outputs: list[list[int]], evicted: int, query: list[int]
) -> None:
    index = OccurrenceIndex([], 2, LONGEST)
    for output in outputs:
        index.extend([*output, SEPARATOR])
    evicted = min(evicted, len(outputs))
    for output in outputs[:evicted]:
        index.evict(len(output) + 1)
    rest = [token for output in outputs[evicted:] for token in (*output, SEPARATOR)]
    found = index.find(query, 1000)
    assert {end - index.base: length for end, length in found.items()} == scan(rest, query, 2)
    for end in found:
        assert SEPARATOR not in index.following(end, 20)


def test_only_the_latest_occurrences_are_examined() -> None:
    index = OccurrenceIndex([], 1, 1)
    index.extend([7, 1] * 50 + [7])
    assert sorted(index.find([7], 3)) == [95, 97, 99]


def test_an_empty_index_holds_nothing_after_everything_is_removed() -> None:
    index = OccurrenceIndex([], 1, 4)
    index.extend(range(20))
    index.cut(0)
    index.extend([1, 2, SEPARATOR])
    index.evict(3)
    assert not index.tokens and not any(index._heads) and not any(index._previous)
