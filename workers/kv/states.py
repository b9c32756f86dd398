"""The states of recurrent and convolutional layers, beside the paged keys and values.

Such a layer keeps, instead of keys and values for every token, a few tensors of fixed size that each token changes. A
sequence holds one committed state. A step computes further ones: the state after the row's committed tokens, and the
state after every node of its draft tree. The verdict selects one of them, and the others are dropped, so a rejected
draft never changes a committed state. All of them are counted, and the count is bounded before memory is spent. States
at the ends of cached blocks stay for later sequences (`workers.kv.prefix_states`), counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from cluster.core.errors import KvPoolExhausted
from cluster.core.tree import ROOT
from workers.kv.prefix_states import LayerState, ModelState, PrefixStates

STATES_PER_SEQUENCE = 3
"""States that a pool holds for each sequence: the committed one, the next one, and on average one node's."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one recurrent or convolutional layer."""

    layer: int
    """Number of the layer in the model."""
    parts: tuple[StatePart, ...]

    @property
    def size(self) -> int:
        """Bytes of one state."""
        return sum(part.size for part in self.parts)


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The states of one sequence."""

    committed: ModelState = field(default_factory=dict)
    """By layer, after the stored tokens; empty before the first of them: every part is then zero."""
    fresh: list[ModelState] = field(default_factory=list)
    """What the step computes: the state after the row's tokens, then after every node of its tree."""
    marks: set[int] = field(default_factory=set)
    """Lengths, at block ends, after which the state is kept for other sequences."""
    kept: dict[int, ModelState] = field(default_factory=dict)
    """What the step keeps inside the row's tokens, by the length of the sequence there."""
    latest: bytes = b""
    """The key of the last block end beyond the marks whose state was kept; the next one takes its place."""


class StateStore:
    """The states of all sequences on this rank. It counts whole states, of all layers together."""

    def __init__(self, shapes: tuple[StateShape, ...], device: torch.device, capacity: int, prefixes: int = 0) -> None:
        """At most `capacity` states of sequences are held at a time, and `prefixes` at the ends of cached blocks."""
        self.prefixes = PrefixStates(prefixes)
        self.shapes = {shape.layer: shape for shape in shapes}
        self.capacity = capacity
        self._device = device
        self._held = 0
        self._zeros: dict[int, LayerState] = {}

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
        states.fresh = [{} for _ in range(count)]
        self._held += count

    def last(self, states: SequenceStates, layer: int) -> LayerState:
        """The layer's committed state. It must not be changed."""
        if states.committed:
            return states.committed[layer]
        if layer not in self._zeros:
            parts = self.shapes[layer].parts
            self._zeros[layer] = tuple(torch.zeros(part.shape, dtype=part.dtype, device=self._device) for part in parts)
        return self._zeros[layer]

    def keep(self, states: SequenceStates, lengths: Sequence[int]) -> Mapping[int, ModelState]:
        """Where the sequence's next step puts the states after these lengths, inside its row's tokens.

        Returns no place if there is no room for all of them.
        """
        self._drop_kept(states)
        if lengths and self.prefixes.claim(len(lengths)):
            states.kept = {length: {} for length in lengths}
        return states.kept

    def commit(self, states: SequenceStates, node: int = ROOT) -> None:
        """Keep the state after this node of the step, or after the row's tokens, and drop the others.

        Raises `ValueError` if no step computed it.
        """
        if not 0 <= node + 1 < len(states.fresh) or states.fresh[node + 1].keys() != self.shapes.keys():
            raise ValueError(f"no step has computed the state after node {node}")
        self._held += 1 - bool(states.committed)
        states.committed = states.fresh[node + 1]
        self.drop(states)

    def assume(self, states: SequenceStates) -> None:
        """Give a sequence a committed state without values, as if a step had computed it."""
        states.fresh = [
            {
                layer: tuple(torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in shape.parts)
                for layer, shape in self.shapes.items()
            }
        ]
        self._held += 1
        self.commit(states)

    def drop(self, states: SequenceStates) -> None:
        """Drop what a step computed and no verdict selected."""
        self._held -= len(states.fresh)
        states.fresh = []
        self._drop_kept(states)

    def _drop_kept(self, states: SequenceStates) -> None:
        self.prefixes.unclaim(len(states.kept))
        states.kept = {}

    def release(self, states: SequenceStates) -> None:
        """Drop all states of a sequence. Releasing them again does nothing."""
        self.drop(states)
        self._held -= bool(states.committed)
        states.committed = {}

    def share(self, source: SequenceStates, states: SequenceStates) -> None:
        """Let a new sequence begin with the committed state of another one.

        Raises `KvPoolExhausted` if no state is free.
        """
        if source.committed:
            self._begin(states, source.committed)

    def begin(self, states: SequenceStates, key: bytes) -> None:
        """Let a new sequence begin with the state after the cached block with this key.

        Raises `KvPoolExhausted` if no state is free, `KeyError` if none follows that block.
        """
        self._begin(states, self.prefixes.use(key))

    def _begin(self, states: SequenceStates, committed: ModelState) -> None:
        if self.free < 1:
            raise KvPoolExhausted(f"none of {self.capacity} recurrent states is free")
        states.committed = committed
        self._held += 1
