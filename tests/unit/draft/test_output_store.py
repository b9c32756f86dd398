"""The store of outputs is bounded, evicts the oldest output first, and separates salts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.draft.suffix import OutputStore


def stored(store: OutputStore, salt: str, context: list[int]) -> list[list[int]]:
    index = store.index(salt)
    return [] if index is None else [index.following(position, 9) for position in index.find(context, 9)]


def test_an_output_is_found_by_its_own_salt_only() -> None:
    store = OutputStore(100, 2, 8)
    store.add("one", [1, 2, 3, 4])
    store.add("two", [1, 2, 9])
    assert stored(store, "one", [1, 2]) == [[3, 4]]
    assert stored(store, "two", [1, 2]) == [[9]]
    assert stored(store, "", [1, 2]) == []


def test_the_latest_output_comes_first_and_the_oldest_is_evicted() -> None:
    store = OutputStore(12, 2, 8)
    for last in (5, 6, 7):
        store.add("", [1, 2, last])
    assert stored(store, "", [1, 2]) == [[7], [6], [5]]
    store.add("", [1, 2, 8])
    assert stored(store, "", [1, 2]) == [[8], [7], [6]]


def test_the_oldest_output_is_evicted_whatever_its_salt_and_empty_salts_are_dropped() -> None:
    store = OutputStore(8, 2, 8)
    store.add("one", [1, 2, 3])
    store.add("two", [1, 2, 3])
    store.add("two", [1, 2, 4])
    assert store.salts == {"two"}
    assert len(store) == 8


def test_the_end_of_an_output_longer_than_the_store_is_kept() -> None:
    store = OutputStore(5, 2, 8)
    store.add("", [*range(20)])
    assert stored(store, "", [16, 17]) == [[18, 19]]


def test_a_store_of_no_tokens_keeps_nothing() -> None:
    store = OutputStore(0, 2, 8)
    store.add("", [1, 2, 3, 4])
    assert (len(store), store.salts) == (0, frozenset())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), max_size=12)), max_size=20))
def test_the_store_never_exceeds_its_bound(outputs: list[tuple[str, list[int]]]) -> None:
    store = OutputStore(24, 2, 4)
    for salt, tokens in outputs:
        store.add(salt, tokens)
        indexes = [store.index(salt) for salt in store.salts]
        assert len(store) == sum(len(index.tokens) for index in indexes if index is not None) <= 24
