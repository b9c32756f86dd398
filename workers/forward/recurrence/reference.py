"""The recurrences in plain torch, one token after another: their definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from workers.forward.recurrence.base import DeltaInputs, SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan

_Advance = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(token, the state before it) → (the state after it, the output)."""


class ReferenceKernels:
    """`RecurrenceKernels` that compute one token at a time."""

    def convolution(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: RecurrencePlan,
        activation: str | None,
    ) -> torch.Tensor:
        width, factors = weight.shape[1], weight.float()

        def advance(token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            window = torch.cat([state, inputs[token, :, None].float()], dim=1)
            output = torch.zeros_like(factors[:, 0]) if bias is None else bias.float()
            for place in range(width):
                output = output + factors[:, place] * window[:, place - width]
            return window[:, 1:], functional.silu(output) if activation == "silu" else output

        return _advanced(advance, states, plan).to(inputs.dtype)

    def gated_delta_rule(self, of: DeltaInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        query, key, value = of.query.float(), of.key.float(), of.value.float()

        def advance(token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = state * of.log_decay[token].exp()[:, None, None]
            stored = (state * key[token, :, :, None]).sum(1)
            written = (value[token] - stored) * of.beta[token, :, None]
            state = state + key[token, :, :, None] * written[:, None]
            return state, (state * query[token, :, :, None]).sum(1)

        return _advanced(advance, states, plan).to(of.value.dtype)

    def state_space(self, of: SpaceInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        heads, groups = of.inputs.shape[1], of.b.shape[1]
        decay = of.a.view(heads, -1)
        inputs = of.inputs.float()

        def of_heads(values: torch.Tensor) -> torch.Tensor:
            return values.float().repeat_interleave(heads // groups, dim=0)[:, None]

        def advance(token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, step = inputs[token, :, :, None], of.steps[token, :, None]
            state = state * (step * decay).exp()[:, None] + (step[:, None] * x) * of_heads(of.b[token])
            return state, (state * of_heads(of.c[token])).sum(2) + of.d[:, None] * x[..., 0]

        return _advanced(advance, states, plan).to(of.inputs.dtype)


def _advanced(advance: _Advance, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
    """The outputs of all tokens, each of them `advance`d from the state before it."""
    state, outputs = states[0].float(), list[torch.Tensor]()
    moves = zip(plan.source.tolist(), plan.target.tolist(), strict=True)  # also those of padding
    for token, (source, target) in enumerate(moves):
        state, output = advance(token, state if source < 0 else states[source].float())
        if target >= 0:
            states[target] = state
        outputs.append(output)
    return torch.stack(outputs)
