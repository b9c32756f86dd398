"""States at the ends of cached blocks: bounded, and the least recently used one goes first."""

from __future__ import annotations

import torch

from workers.kv.prefix_states import ModelState, PrefixStates


def state(number: int) -> ModelState:
    return {0: (torch.full((2,), float(number)),)}


def filled(capacity: int, *keys: bytes) -> PrefixStates:
    states = PrefixStates(capacity)
    for number, key in enumerate(keys):
        states.put(key, state(number))
    return states


def held(states: PrefixStates) -> set[bytes]:
    return {key for key in (b"a", b"b", b"c", b"d") if key in states}


def test_the_least_recently_used_state_makes_room() -> None:
    states = filled(3, b"a", b"b", b"c")
    assert float(states.use(b"a")[0][0][0]) == 0
    states.put(b"b", state(1))  # computed again, and it has the same bits
    states.put(b"d", state(3))
    assert held(states) == {b"a", b"b", b"d"}


def test_room_for_what_a_step_computes_is_taken_before_it() -> None:
    states = filled(3, b"a", b"b", b"c")
    assert states.claim(2)
    assert (held(states), len(states)) == ({b"c"}, 1)
    assert not states.claim(2)
    states.put(b"d", state(3))
    assert held(states) == {b"d"}
    assert states.claim(1)
    states.put(b"a", state(0))  # all room is claimed
    assert held(states) == set()
    states.unclaim(3)
    states.put(b"a", state(0))
    assert held(states) == {b"a"}


def test_a_state_is_forgotten_unless_a_sequence_has_begun_there() -> None:
    states = filled(3, b"a", b"b")
    states.use(b"a")
    for key in (b"a", b"b", b"c"):
        states.forget(key)
    assert held(states) == {b"a"}


def test_without_capacity_nothing_is_kept() -> None:
    states = filled(0, b"a")
    assert (len(states), states.claim(1)) == (0, False)
