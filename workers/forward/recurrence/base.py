"""What computes the recurrences of a step: causal convolutions, gated delta rules and state space models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.forward.recurrence.plan import RecurrencePlan


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """What a gated delta rule reads of each token."""

    query: torch.Tensor
    """`[tokens, heads, key_dim]`, normalized and scaled."""
    key: torch.Tensor
    """`[tokens, heads, key_dim]`, normalized."""
    value: torch.Tensor
    """`[tokens, heads, value_dim]`."""
    log_decay: torch.Tensor
    """float32 `[tokens, heads]`, at most 0."""
    beta: torch.Tensor
    """float32 `[tokens, heads]`: how much of the difference from what is stored is written."""


@dataclass(frozen=True, slots=True, eq=False)
class SpaceInputs:
    """What a state space model reads of each token, and its own matrices."""

    inputs: torch.Tensor
    """`[tokens, heads, head_dim]`."""
    steps: torch.Tensor
    """float32 `[tokens, heads]`, at least 0."""
    a: torch.Tensor
    """The decay, float32 `[heads]`, or `[heads, state]`: below 0."""
    b: torch.Tensor
    """What inputs write, `[tokens, groups, state]`. Consecutive heads share a group."""
    c: torch.Tensor
    """What outputs read, `[tokens, groups, state]`."""
    d: torch.Tensor
    """float32 `[heads]`: the factor of the inputs in the outputs."""


class RecurrenceKernels(Protocol):
    """Recurrences over all tokens of all rows of a step.

    The tokens of a row are computed one after another, in float32 and in a fixed order, so that the bits of a token and
    of a state depend on the tokens before it alone: not on how a prompt was divided, nor on other rows. `states` are
    `[slots, …]`; slots are read and written as the plan says. Results have the type of the inputs.
    """

    def convolution(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: RecurrencePlan,
        activation: str | None,
    ) -> torch.Tensor:
        """A causal convolution of each channel by itself, `[tokens, channels]` → the same.

        `weight` `[channels, width]` ends with the factor of the token itself; `bias` is `[channels]`. `states`
        `[slots, channels, inputs]` hold the last inputs, at least `width - 1` of them. `activation` is `silu` or
        `None`.
        """

    def gated_delta_rule(self, of: DeltaInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        """The gated delta rule (Yang et al. 2024, equation 10), → `[tokens, heads, value_dim]`.

        `S = exp(log_decay) S; S += key ⊗ beta (value − Sᵀ key); output = Sᵀ query`, with states S float32
        `[slots, heads, key_dim, value_dim]`.
        """

    def state_space(self, of: SpaceInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        """A selective state space model (Mamba-2, Dao and Gu 2024), → `[tokens, heads, head_dim]`.

        `h = exp(step a) h + step x ⊗ b; output = h c + d x`, with states h float32 `[slots, heads, head_dim, state]`.
        """
