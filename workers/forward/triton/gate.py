"""The SiLU of one half of a feed-forward network's wide projection times its other half, in one launch.

`torch.nn.functional.silu(gates) * values` is the reference, with its rounding between the two steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024
"""Columns of one program."""
_LARGEST = tl.constexpr(88.0)
"""Bound of the negated gate. Its exponential is a finite float32, and SiLU beyond it is as good as 0."""


def silu_mul(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`silu(gates) * values`, `[rows, width]` each. Rows may lie apart, their numbers may not."""
    rows, width = gates.shape
    output = torch.empty((rows, width), dtype=gates.dtype, device=gates.device)
    gate_columns[(rows, triton.cdiv(width, _COLUMNS))](
        gates, values, output, gates.stride(0), values.stride(0), WIDTH=width, COLUMNS=_COLUMNS, num_warps=4
    )
    return output


@triton.jit
def gate_columns(gates, values, output, gate_row, value_row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    gate = tl.load(gates + row * gate_row + column, mask=is_column, other=0.0)
    value = tl.load(values + row * value_row + column, mask=is_column, other=0.0)
    tl.store(output + row * WIDTH + column, gated(gate, value), mask=is_column)


@triton.jit
def gated(gate, value):
    """`silu(gate) * value`, in their type."""
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(tl.minimum(-wide, _LARGEST)))).to(gate.dtype)
    return (opened.to(tl.float32) * value.to(tl.float32)).to(gate.dtype)
