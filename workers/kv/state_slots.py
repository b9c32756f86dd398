"""Slots for the states of recurrent and convolutional layers: one tensor for each part of each layer.

A slot has a number, and holds the state of a whole model. Several holders may share one that nobody writes any more; it
is free again when the last of them lets go.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

ZERO = 0
"""The slot of the state before the first token. It is only read."""
LayerState = tuple[torch.Tensor, ...]
"""The tensors of one layer's state, in the order of its `StateShape`, each `[slots, *shape]`."""


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

    def slots(self, count: int, device: torch.device) -> LayerState:
        """Zeros for `count` states."""
        return tuple(torch.zeros((count, *part.shape), dtype=part.dtype, device=device) for part in self.parts)


class StateSlots:
    """The states of a model, by slot. The first slot is the state before the first token."""

    def __init__(self, shapes: tuple[StateShape, ...], device: torch.device, count: int) -> None:
        """`count` slots, besides the first one."""
        self.layers = {shape.layer: shape.slots(1 + count, device) for shape in shapes}
        self._free = list(range(count, ZERO, -1))
        self._holders = [0] * (1 + count)

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A slot that nobody else holds, with any content. Raises `IndexError` if none is free."""
        return self.hold(self._free.pop())

    def hold(self, slot: int) -> int:
        """Hold a slot, beside those who hold it already. Returns it."""
        self._holders[slot] += slot != ZERO
        return slot

    def let_go(self, slot: int) -> None:
        """End one hold of a slot."""
        if slot == ZERO:
            return
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)
