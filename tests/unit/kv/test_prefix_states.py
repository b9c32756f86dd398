"""States at the ends of cached blocks: bounded, and the least recently used one goes first."""

from __future__ import annotations

import torch

from workers.kv.prefix_states import PrefixStates
from workers.kv.state_slots import StateSlots

SLOTS = 5


def slots() -> StateSlots:
    return StateSlots((), torch.device("cpu"), SLOTS)


def put(states: PrefixStates, key: bytes) -> int:
    """Keep a new slot, which only the states hold then."""
    slot = states._slots.take()
    states.put(key, slot)
    states._slots.let_go(slot)
    return slot


def filled(capacity: int, *keys: bytes) -> PrefixStates:
    states = PrefixStates(capacity, slots())
    for key in keys:
        put(states, key)
    return states


def held(states: PrefixStates) -> set[bytes]:
    return {key for key in (b"a", b"b", b"c", b"d") if key in states}


def test_the_least_recently_used_state_makes_room() -> None:
    states = filled(3, b"a", b"c")
    slot = put(states, b"b")
    states.use(b"a")
    put(states, b"b")  # computed again, and it has the same bits
    assert states.use(b"b") == slot
    put(states, b"d")
    assert held(states) == {b"a", b"b", b"d"}
    assert states._slots.free == SLOTS - 3


def test_room_for_what_a_step_computes_is_taken_before_it() -> None:
    states = filled(3, b"a", b"b", b"c")
    assert states.claim(2)
    assert (held(states), len(states)) == ({b"c"}, 1)
    assert not states.claim(2)
    put(states, b"d")
    assert held(states) == {b"d"}
    assert states.claim(1)
    put(states, b"a")  # all room is claimed
    assert held(states) == set()
    states.unclaim(3)
    put(states, b"a")
    assert held(states) == {b"a"}


def test_a_state_is_forgotten_unless_a_sequence_has_begun_there() -> None:
    states = filled(3, b"a", b"b")
    states.use(b"a")
    for key in (b"a", b"b", b"c"):
        states.forget(key)
    assert held(states) == {b"a"}
    assert states._slots.free == SLOTS - 1


def test_without_capacity_nothing_is_kept() -> None:
    states = filled(0, b"a")
    assert (len(states), states.claim(1)) == (0, False)
