"""The kernels of recurrent layers, which are counted instead of launched."""

from __future__ import annotations

import torch

from deploy.simulation.device.fake_device import Kernel, KernelCounter
from workers.forward.recurrence.base import DeltaInputs, SpaceInputs
from workers.forward.recurrence.mixers import make_mixer
from workers.forward.recurrence.plan import RecurrencePlan
from workers.forward.recurrent import RecurrentLayers


class CountedRecurrences:
    """`RecurrenceKernels` of which each launch is counted."""

    def __init__(self, counter: KernelCounter, longest: int, moves: int) -> None:
        """`longest` is the number of tokens of the longest row, `moves` that of states read and written by all rows."""
        self._counter, self._longest, self._moves = counter, longest, moves

    def convolution(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,  # noqa: ARG002 - part of the interface
        states: torch.Tensor,
        plan: RecurrencePlan,  # noqa: ARG002
        activation: str | None,  # noqa: ARG002
    ) -> torch.Tensor:
        moved = (2 * inputs.numel() + weight.numel()) * inputs.element_size() + self._state_bytes(states)
        self._counter.add(Kernel("convolve_token", moved, 2 * len(inputs) * weight.numel()))
        return inputs.new_empty(inputs.shape)

    def gated_delta_rule(self, of: DeltaInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        read = (of.query, of.key, of.value, of.log_decay, of.beta)
        self._advance("advance_delta_row", read, of.value, 7, states)
        return plan.output(of.value.shape, of.value)

    def state_space(self, of: SpaceInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        read = (of.inputs, of.steps, of.a, of.b, of.c, of.d)
        self._advance("advance_space_row", read, of.inputs, 6, states)
        return plan.output(of.inputs.shape, of.inputs)

    def _advance(
        self,
        name: str,
        read: tuple[torch.Tensor, ...],
        output: torch.Tensor,
        operations: int,
        states: torch.Tensor,
    ) -> None:
        """Count a launch that does some `operations` with each number of a state for each token."""
        moved = sum(one.numel() * one.element_size() for one in (*read, output)) + self._state_bytes(states)
        flops = operations * len(output) * states[0].numel()
        self._counter.add(Kernel(name, moved, flops, steps=self._longest))

    def _state_bytes(self, states: torch.Tensor) -> int:
        """Bytes of the states that are read and written."""
        return self._moves * states[0].numel() * states.element_size()


def count_recurrences(layers: RecurrentLayers, kernels: CountedRecurrences) -> None:
    """Compute all recurrent layers by kernels that are counted. Raises `RuntimeError` if one is of no known kind."""
    for part in layers.parts:
        if (mixer := make_mixer(part.module, kernels)) is None:
            raise RuntimeError(f"{type(part.module).__name__} is not computed by the kernels")
        layers.mixers[part.layer] = mixer
