"""The causal convolutions of all tokens of a step, one launch: a token needs the inputs before it alone.

`workers.forward.recurrence.reference` is the definition. A program computes some channels of one token. It follows the
tokens before its own, in a tree through its ancestors, and then reads what the row's slot holds, so that no token waits
for another one, and no program reads what another one writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.recurrence.plan import RecurrencePlan

_CHANNELS = 512
"""Channels of a program."""


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    plan: RecurrencePlan,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """`inputs` `[tokens, channels]` with contiguous channels, `weight` `[channels, width]` → `[tokens, channels]`.

    `states` `[slots, channels, inputs]`, contiguous, hold the last inputs, and get those of the plan's targets.
    """
    tokens, channels = inputs.shape
    output = torch.empty((tokens, channels), dtype=inputs.dtype, device=inputs.device)
    width, stored = weight.shape[1], states.shape[2]
    convolve_token[(tokens, triton.cdiv(channels, _CHANNELS))](
        inputs, weight.contiguous(), inputs if bias is None else bias, states, output,
        plan.parents, plan.source, plan.target, inputs.stride(0),
        CHANNELS=channels, BLOCK=_CHANNELS, WIDTH=width, STORED=stored, MOST=max(width, stored),
        HAS_BIAS=bias is not None, HAS_SILU=has_silu,
    )  # fmt: skip
    return output


@triton.jit
def convolve_token(
    inputs, weight, bias, states, output, parents, source, target, input_token,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of one token, and store their last inputs if the token has a target."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    to = tl.load(target + token).to(tl.int64)
    at = token  # whose input is next, until there are none but those of a slot
    slot = token * 0 - 1
    place = STORED
    for back in tl.static_range(MOST):
        if slot < 0:
            number = tl.load(inputs + at * input_token + channel, mask=is_channel, other=0.0)
            before = tl.load(parents + at).to(tl.int64)
            if before < 0:
                slot = tl.load(source + at).to(tl.int64)
            else:
                at = before
        else:
            held = states + (slot * CHANNELS + channel) * STORED + place
            number = tl.load(held, mask=is_channel, other=0.0).to(inputs.dtype.element_ty)
        if slot >= 0:
            place -= 1
        if back < WIDTH:
            factor = tl.load(weight + channel * WIDTH + WIDTH - 1 - back, mask=is_channel, other=0.0)
            total += factor.to(tl.float32) * number.to(tl.float32)
        if (to >= 0) & (back < STORED):
            kept = states + (to * CHANNELS + channel) * STORED + STORED - 1 - back
            tl.store(kept, number.to(states.dtype.element_ty), mask=is_channel)
    if HAS_SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output + token * CHANNELS + channel, total.to(output.dtype.element_ty), mask=is_channel)
