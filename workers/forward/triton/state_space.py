"""Selective state space models over all tokens of a step, one launch.

`workers.forward.recurrence.reference` is the definition. A program holds the states of some channels in its registers,
and computes the tokens of one row, one after another. It adds in one order, whatever the number of rows and of tokens,
so the bits of a token depend on the tokens before it alone.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from workers.forward.recurrence.base import SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan

_NUMBERS = 1024
"""Numbers of the states of a program, if so many of its channels share a group."""
SPACE_WARPS = 1


def space_channels(channels: int, groups: int, size: int) -> int:
    """Channels of a program, of one group: a power of two."""
    return gcd(channels // groups, max(1, _NUMBERS // triton.next_power_of_2(size)))


def state_space(of: SpaceInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
    """A state space model, `[tokens, heads, head_dim]`. `states` `[slots, heads, head_dim, state]` are contiguous."""
    tokens, heads, dim = of.inputs.shape
    groups, size = of.b.shape[1:]
    output = plan.output((tokens, heads, dim), of.inputs)
    inputs = of.inputs if of.inputs.stride()[1:] == (dim, 1) else of.inputs.contiguous()
    b, c = (one if one.stride()[1:] == (size, 1) else one.contiguous() for one in (of.b, of.c))
    block = space_channels(heads * dim, groups, size)
    advance_space_row[(len(plan.row_starts) - 1, heads * dim // block)](
        inputs, of.steps.contiguous(), of.a, b, c, of.d, states, output,
        plan.row_starts, plan.source, plan.target, inputs.stride(0), b.stride(0), c.stride(0),
        CHANNELS=heads * dim, HEADS=heads, GROUPS=groups, SIZE=size, WIDTH=triton.next_power_of_2(size), BLOCK=block,
        HAS_DECAYS=of.a.dim() == 2, num_warps=SPACE_WARPS,
    )  # fmt: skip
    return output


@triton.jit
def advance_space_row(
    inputs, steps, a, b, c, d, states, output, row_starts, source, target, input_token, b_token, c_token,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, HAS_DECAYS: tl.constexpr,
):  # fmt: skip
    """Compute some channels, which are numbers of heads, for the tokens of one row."""
    row, block = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(row_starts + row).to(tl.int64), tl.load(row_starts + row + 1).to(tl.int64)
    channels = block * BLOCK + tl.arange(0, BLOCK)
    heads = channels // (CHANNELS // HEADS)
    places = tl.arange(0, WIDTH)
    is_place = places < SIZE
    is_number = (channels < CHANNELS)[:, None] & is_place[None, :]
    numbers = states + channels[:, None] * SIZE + places[None, :]
    group = block * BLOCK // (CHANNELS // GROUPS)
    if HAS_DECAYS:
        decay = tl.load(a + heads[:, None] * SIZE + places[None, :], mask=is_number, other=0.0).to(tl.float32)
    else:
        decay = tl.load(a + heads).to(tl.float32)[:, None]
    through = tl.load(d + heads).to(tl.float32)
    tensors = inputs + channels, steps + heads, b + group * SIZE + places, c + group * SIZE + places, source
    strides = input_token, b_token, c_token
    ahead = _load_token(first, end, tensors, strides, is_place, HEADS)
    state = tl.zeros([BLOCK, WIDTH], tl.float32)
    for token in range(first, end):
        own, step, written, read, slot = ahead
        ahead = _load_token(token + 1, end, tensors, strides, is_place, HEADS)  # arrives while this one computes
        if slot >= 0:
            tl.debug_barrier()  # this program's other threads may have stored it
            state = tl.load(numbers + slot * (CHANNELS * SIZE), mask=is_number, other=0.0)
        own, step = own.to(tl.float32), step.to(tl.float32)
        written, read = written.to(tl.float32), read.to(tl.float32)
        state = state * tl.exp(step[:, None] * decay) + (step * own)[:, None] * written[None, :]
        found = tl.sum(state * read[None, :], axis=1) + through * own
        tl.store(output + token * CHANNELS + channels, found.to(output.dtype.element_ty))
        to = tl.load(target + token).to(tl.int64)
        if to >= 0:
            tl.store(numbers + to * (CHANNELS * SIZE), state, mask=is_number)


@triton.jit
def _load_token(token, end, tensors, strides, is_place, HEADS: tl.constexpr):
    """What a token reads; for the one after a row's last, that of the last."""
    inputs, steps, b, c, source = tensors
    input_token, b_token, c_token = strides
    token = tl.maximum(tl.minimum(token, end - 1), 0)
    return (
        tl.load(inputs + token * input_token),
        tl.load(steps + token * HEADS),
        tl.load(b + token * b_token, mask=is_place, other=0.0),
        tl.load(c + token * c_token, mask=is_place, other=0.0),
        tl.load(source + token).to(tl.int64),
    )
