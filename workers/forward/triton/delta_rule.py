"""The gated delta rule over all tokens of a step, one launch.

`workers.forward.recurrence.reference` is the definition. A program holds some value columns of one head's state in its
registers, and computes the tokens of one row, one after another. It adds in one order, whatever the number of rows and
of tokens, so the bits of a token depend on the tokens before it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.recurrence.base import DeltaInputs
from workers.forward.recurrence.plan import RecurrencePlan

VALUES, DELTA_WARPS = 8, 1
"""Value columns, and warps, of a program."""


def gated_delta_rule(of: DeltaInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
    """The gated delta rule, `[tokens, heads, value_dim]`. `states` `[slots, heads, key_dim, value_dim]` are contiguous.

    Queries and keys may have fewer heads, which divide the values': consecutive heads then share one.
    """
    tokens, heads, values = of.value.shape
    key_heads, keys = of.key.shape[1:]
    output = plan.output((tokens, heads, values), of.value)
    query, key, value = (one if one.stride()[1:] == (one.shape[2], 1) else one.contiguous() for one in (
        of.query, of.key, of.value
    ))  # fmt: skip
    advance_delta_row[(len(plan.row_starts) - 1, heads, triton.cdiv(values, VALUES))](
        query, key, value, of.log_decay.contiguous(), of.beta.contiguous(), states, output,
        plan.row_starts, plan.source, plan.target, query.stride(0), key.stride(0), value.stride(0),
        HEADS=heads, GROUP=heads // key_heads, KEYS=keys, KEY_WIDTH=triton.next_power_of_2(keys),
        VALUES=values, BLOCK=VALUES, num_warps=DELTA_WARPS,
    )  # fmt: skip
    return output


@triton.jit
def advance_delta_row(
    query, key, value, log_decay, beta, states, output, row_starts, source, target,
    query_token, key_token, value_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute some value columns of one head for the tokens of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(row_starts + row).to(tl.int64), tl.load(row_starts + row + 1).to(tl.int64)
    keys = tl.arange(0, KEY_WIDTH)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = keys < KEYS, columns < VALUES
    is_number = is_key[:, None] & is_column[None, :]
    numbers = states + head * KEYS * VALUES + keys[:, None] * VALUES + columns[None, :]
    query += head // GROUP * KEYS + keys
    key += head // GROUP * KEYS + keys
    value += head * VALUES + columns
    output += head * VALUES + columns
    inputs = query, key, value, log_decay + head, beta + head, source
    strides = query_token, key_token, value_token
    ahead = _load_token(first, end, inputs, strides, is_key, is_column, HEADS)
    state = tl.zeros([KEY_WIDTH, BLOCK], tl.float32)
    for token in range(first, end):
        asked, own, written, decay, share, slot = ahead
        ahead = _load_token(
            token + 1, end, inputs, strides, is_key, is_column, HEADS
        )  # arrives while this one computes
        if slot >= 0:
            tl.debug_barrier()  # this program's other threads may have stored it
            state = tl.load(numbers + slot * (HEADS * KEYS * VALUES), mask=is_number, other=0.0)
        asked, own, written = asked.to(tl.float32), own.to(tl.float32), written.to(tl.float32)
        state *= tl.exp(decay)
        written = (written - tl.sum(state * own[:, None], axis=0)) * share
        state += own[:, None] * written[None, :]
        found = tl.sum(state * asked[:, None], axis=0)
        tl.store(output + token * (HEADS * VALUES), found.to(output.dtype.element_ty), mask=is_column)
        to = tl.load(target + token).to(tl.int64)
        if to >= 0:
            tl.store(numbers + to * (HEADS * KEYS * VALUES), state, mask=is_number)


@triton.jit
def _load_token(token, end, inputs, strides, is_key, is_column, HEADS: tl.constexpr):
    """What a token reads; for the one after a row's last, that of the last."""
    query, key, value, log_decay, beta, source = inputs
    query_token, key_token, value_token = strides
    token = tl.maximum(tl.minimum(token, end - 1), 0)
    return (
        tl.load(query + token * query_token, mask=is_key, other=0.0),
        tl.load(key + token * key_token, mask=is_key, other=0.0),
        tl.load(value + token * value_token, mask=is_column, other=0.0),
        tl.load(log_decay + token * HEADS),
        tl.load(beta + token * HEADS),
        tl.load(source + token).to(tl.int64),
    )
