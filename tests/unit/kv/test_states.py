"""States of recurrent layers: counted before they are computed, selected by a verdict, dropped otherwise."""

from __future__ import annotations

import pytest
import torch

from cluster.core.errors import KvPoolExhausted
from workers.kv.states import SequenceStates, StatePart, StateShape, StateStore

SHAPES = (
    StateShape(0, (StatePart((1, 4, 3), torch.float32), StatePart((1, 2, 5), torch.bfloat16))),
    StateShape(3, (StatePart((1, 6), torch.float32),)),
)


@pytest.fixture
def store() -> StateStore:
    return StateStore(SHAPES, torch.device("cpu"), capacity=4)


def compute(store: StateStore, states: SequenceStates, count: int) -> None:
    """A step whose states hold their own number."""
    store.claim(states, count)
    for number, fresh in enumerate(states.fresh):
        for layer, shape in store.shapes.items():
            fresh[layer] = tuple(torch.full(part.shape, number, dtype=part.dtype) for part in shape.parts)


def test_a_state_is_as_large_as_its_parts(store: StateStore) -> None:
    assert store.size == 4 * 3 * 4 + 2 * 5 * 2 + 6 * 4


def test_a_sequence_begins_with_zeros(store: StateStore) -> None:
    convolution, recurrent = store.last(SequenceStates(), 0)
    assert (convolution.shape, recurrent.dtype) == ((1, 4, 3), torch.bfloat16)
    assert not convolution.any() and not recurrent.any()


def test_a_verdict_selects_one_state_and_frees_the_others(store: StateStore) -> None:
    states = SequenceStates()
    compute(store, states, 4)
    assert store.free == 0
    store.commit(states, node=1)
    assert store.free == 3
    assert float(store.last(states, 3)[0][0, 0]) == 2
    compute(store, states, 2)
    store.commit(states)
    assert (store.free, float(store.last(states, 3)[0][0, 0])) == (3, 0)


def test_a_failed_step_keeps_the_committed_state(store: StateStore) -> None:
    states = SequenceStates()
    compute(store, states, 2)
    store.commit(states, node=0)
    compute(store, states, 3)
    store.drop(states)
    assert (store.free, float(store.last(states, 3)[0][0, 0])) == (3, 1)


def test_no_more_states_are_claimed_than_there_is_room_for(store: StateStore) -> None:
    first, second = SequenceStates(), SequenceStates()
    store.claim(first, 3)
    with pytest.raises(KvPoolExhausted, match=r"2 recurrent states are needed and 1 of 4 are free"):
        store.claim(second, 2)
    store.claim(first, 4)  # in place of its earlier ones
    store.release(first)
    store.release(first)
    assert store.free == 4


def test_a_state_that_no_step_computed_is_not_committed(store: StateStore) -> None:
    states = SequenceStates()
    with pytest.raises(ValueError, match="node -1"):
        store.commit(states)
    store.claim(states, 2)
    with pytest.raises(ValueError, match="node 0"):
        store.commit(states, node=0)
    compute(store, states, 2)
    with pytest.raises(ValueError, match="node 5"):
        store.commit(states, node=5)


def test_a_child_counts_its_own_state(store: StateStore) -> None:
    parent, child = SequenceStates(), SequenceStates()
    store.share(parent, child)
    assert (store.free, child.committed) == (4, {})
    compute(store, parent, 1)
    store.commit(parent)
    store.share(parent, child)
    assert store.free == 2
    store.release(parent)
    assert (store.free, float(store.last(child, 3)[0][0, 0])) == (3, 0)
    store.claim(parent, 3)
    with pytest.raises(KvPoolExhausted, match="none of 4 recurrent states is free"):
        store.share(child, SequenceStates())
