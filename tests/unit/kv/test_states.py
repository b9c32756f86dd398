"""States of recurrent layers: counted before they are computed, selected by a verdict, dropped otherwise."""

from __future__ import annotations

import pytest
import torch

from cluster.core.errors import KvPoolExhausted
from workers.kv.state_slots import StatePart, StateShape
from workers.kv.states import SequenceStates, StateStore

SHAPES = (
    StateShape(0, (StatePart((4, 3), torch.float32), StatePart((2, 5), torch.bfloat16))),
    StateShape(3, (StatePart((6,), torch.float32),)),
)


@pytest.fixture
def store() -> StateStore:
    return StateStore(SHAPES, torch.device("cpu"), capacity=4)


def compute(store: StateStore, states: SequenceStates, count: int) -> None:
    """A step whose states hold their own number."""
    store.claim(states, count)
    for number, slot in enumerate(states.fresh):
        for part in (part for parts in store.slots.layers.values() for part in parts):
            part[slot] = number
    states.is_computed = True


def number(store: StateStore, states: SequenceStates) -> float:
    """What the committed state holds."""
    return float(store.slots.layers[3][0][states.committed, 0])


def test_a_state_is_as_large_as_its_parts(store: StateStore) -> None:
    assert store.size == 4 * 3 * 4 + 2 * 5 * 2 + 6 * 4


def test_a_sequence_begins_with_zeros(store: StateStore) -> None:
    convolution, recurrent = (part[SequenceStates().committed] for part in store.slots.layers[0])
    assert (convolution.shape, recurrent.dtype) == ((4, 3), torch.bfloat16)
    assert not convolution.any() and not recurrent.any()


def test_a_verdict_selects_one_state_and_frees_the_others(store: StateStore) -> None:
    states = SequenceStates()
    compute(store, states, 4)
    assert store.free == 0
    store.commit(states, node=1)
    assert store.free == 3
    assert number(store, states) == 2
    compute(store, states, 2)
    store.commit(states)
    assert (store.free, number(store, states)) == (3, 0)


def test_a_failed_step_keeps_the_committed_state(store: StateStore) -> None:
    states = SequenceStates()
    compute(store, states, 2)
    store.commit(states, node=0)
    compute(store, states, 3)
    store.drop(states)
    assert (store.free, number(store, states)) == (3, 1)


def test_no_more_states_are_claimed_than_there_is_room_for(store: StateStore) -> None:
    first, second = SequenceStates(), SequenceStates()
    store.claim(first, 3)
    with pytest.raises(KvPoolExhausted, match=r"2 recurrent states are needed and 1 of 4 are free"):
        store.claim(second, 2)
    store.claim(first, 4)  # in place of its earlier ones
    store.release(first)
    store.release(first)
    assert store.free == store.slots.free == 4


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
    assert (store.free, child.committed) == (4, 0)
    compute(store, parent, 1)
    store.commit(parent)
    store.share(parent, child)
    assert store.free == 2
    store.release(parent)
    assert (store.free, number(store, child)) == (3, 0)
    store.claim(parent, 3)
    with pytest.raises(KvPoolExhausted, match="none of 4 recurrent states is free"):
        store.share(child, SequenceStates())


def test_a_state_that_is_shared_takes_one_slot() -> None:
    """A committed state, its child's and the one that is kept behind a block are the same slot until all are gone."""
    store = StateStore(SHAPES, torch.device("cpu"), capacity=4, prefixes=2)
    parent, child, later = SequenceStates(), SequenceStates(), SequenceStates()
    compute(store, parent, 3)
    store.keep(parent, [4])
    store.commit(parent, node=1)
    store.share(parent, child)
    store.prefixes.put(b"key", parent.committed)
    assert (store.free, store.slots.free) == (2, 5)
    store.release(parent)
    store.release(child)
    store.begin(later, b"key")
    assert (store.free, store.slots.free, number(store, later)) == (3, 5, 2)
    store.release(later)
    assert store.prefixes.claim(2)
    assert (store.free, store.slots.free) == (4, 6)
