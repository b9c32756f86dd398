"""The recurrences of a step on GPUs, by Triton kernels: one launch each, whatever the number of rows and of tokens."""

from __future__ import annotations

import logging

import torch

from workers.forward.recurrence.base import DeltaInputs, SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan

logger = logging.getLogger(__name__)


def triton_recurrences() -> TritonRecurrences | None:
    """The kernels; `None`, and a line in the log, without `triton`."""
    try:
        return TritonRecurrences()
    except ImportError as error:
        logger.warning("recurrent layers compute one token after another: %s", error)
        return None


class TritonRecurrences:
    """`RecurrenceKernels` on a GPU. Making them raises `ImportError` without `triton`."""

    def __init__(self) -> None:
        from workers.forward.triton import convolution, delta_rule, state_space

        self._convolution, self._delta_rule, self._state_space = convolution, delta_rule, state_space

    def convolution(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: RecurrencePlan,
        activation: str | None,
    ) -> torch.Tensor:
        return self._convolution.convolve(inputs, weight, bias, states, plan, has_silu=activation == "silu")

    def gated_delta_rule(self, of: DeltaInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        return self._delta_rule.gated_delta_rule(of, states, plan)

    def state_space(self, of: SpaceInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        return self._state_space.state_space(of, states, plan)
