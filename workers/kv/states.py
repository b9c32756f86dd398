"""The states of recurrent and convolutional layers, beside the paged keys and values.

Such a layer keeps, instead of keys and values for every token, a few tensors of fixed size that each token changes. A
sequence holds one committed state. A step computes further ones: the state after the row's committed tokens, and the
state after every node of its draft tree. The verdict selects one of them, and the others are dropped, so a rejected
draft never changes a committed state. All of them are counted, and the count is bounded before memory is spent. States
at the ends of cached blocks stay for later sequences (`workers.kv.prefix_states`), counted apart. A state is a slot of
`workers.kv.state_slots`, which is shared rather than copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cluster.core.errors import KvPoolExhausted
from cluster.core.tree import ROOT
from workers.kv.prefix_states import PrefixStates
from workers.kv.state_slots import ZERO, StateShape, StateSlots

STATES_PER_SEQUENCE = 3
"""States that a pool holds for each sequence: the committed one, the next one, and on average one node's."""


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The states of one sequence, by slot."""

    committed: int = ZERO
    """After the stored tokens."""
    fresh: list[int] = field(default_factory=list)
    """What the step computes: the state after the row's tokens, then after every node of its tree."""
    is_computed: bool = False
    """Whether a step has computed `fresh`."""
    marks: set[int] = field(default_factory=set)
    """Lengths, at block ends, after which the state is kept for other sequences."""
    kept: dict[int, int] = field(default_factory=dict)
    """What the step keeps inside the row's tokens, by the length of the sequence there."""
    latest: bytes = b""
    """The key of the last block end beyond the marks whose state was kept; the next one takes its place."""


class StateStore:
    """The states of all sequences on this rank. It counts whole states, of all layers together."""

    def __init__(self, shapes: tuple[StateShape, ...], device: torch.device, capacity: int, prefixes: int = 0) -> None:
        """At most `capacity` states of sequences are held at a time, and `prefixes` at the ends of cached blocks."""
        self.slots = StateSlots(shapes, device, capacity + prefixes)
        self.prefixes = PrefixStates(prefixes, self.slots)
        self.shapes = {shape.layer: shape for shape in shapes}
        self.capacity = capacity
        self._held = 0

    @property
    def free(self) -> int:
        """States that may still be taken."""
        return self.capacity - self._held

    @property
    def size(self) -> int:
        """Bytes of one state."""
        return sum(shape.size for shape in self.shapes.values())

    def claim(self, states: SequenceStates, count: int) -> None:
        """Take room for the `count` states of the sequence's next step, in place of those of an earlier one.

        Raises `KvPoolExhausted` and changes nothing if fewer are free.
        """
        free = self.free + len(states.fresh)
        if count > free:
            raise KvPoolExhausted(
                f"{count} recurrent states are needed and {free} of {self.capacity} are free; target.kv.sequences "
                "bounds them"
            )
        self.drop(states)
        states.fresh = [self.slots.take() for _ in range(count)]
        self._held += count

    def keep(self, states: SequenceStates, lengths: Sequence[int]) -> Mapping[int, int]:
        """Where the sequence's next step puts the states after these lengths, inside its row's tokens.

        Returns no place if there is no room for all of them.
        """
        self._drop_kept(states)
        if lengths and self.prefixes.claim(len(lengths)):
            states.kept = {length: self.slots.take() for length in lengths}
        return states.kept

    def commit(self, states: SequenceStates, node: int = ROOT) -> None:
        """Keep the state after this node of the step, or after the row's tokens, and drop the others.

        Raises `ValueError` if no step computed it.
        """
        if not states.is_computed or not 0 <= node + 1 < len(states.fresh):
            raise ValueError(f"no step has computed the state after node {node}")
        self._held += 1
        chosen = self.slots.hold(states.fresh[node + 1])
        self.release(states)
        states.committed = chosen

    def assume(self, states: SequenceStates) -> None:
        """Give a sequence a committed state of any content, as if a step had computed it."""
        self.claim(states, 1)
        states.is_computed = True
        self.commit(states)

    def drop(self, states: SequenceStates) -> None:
        """Drop what a step computed and no verdict selected."""
        self._held -= len(states.fresh)
        for slot in states.fresh:
            self.slots.let_go(slot)
        states.fresh, states.is_computed = [], False
        self._drop_kept(states)

    def _drop_kept(self, states: SequenceStates) -> None:
        self.prefixes.unclaim(len(states.kept))
        for slot in states.kept.values():
            self.slots.let_go(slot)
        states.kept = {}

    def release(self, states: SequenceStates) -> None:
        """Drop all states of a sequence. Releasing them again does nothing."""
        self.drop(states)
        self._held -= states.committed != ZERO
        self.slots.let_go(states.committed)
        states.committed = ZERO

    def share(self, source: SequenceStates, states: SequenceStates) -> None:
        """Let a new sequence begin with the committed state of another one.

        Raises `KvPoolExhausted` if no state is free.
        """
        if source.committed != ZERO:
            self._begin(states, source.committed)

    def begin(self, states: SequenceStates, key: bytes) -> None:
        """Let a new sequence begin with the state after the cached block with this key.

        Raises `KvPoolExhausted` if no state is free, `KeyError` if none follows that block.
        """
        self._begin(states, self.prefixes.use(key))

    def _begin(self, states: SequenceStates, committed: int) -> None:
        if self.free < 1:
            raise KvPoolExhausted(f"none of {self.capacity} recurrent states is free")
        states.committed = self.slots.hold(committed)
        self._held += 1
