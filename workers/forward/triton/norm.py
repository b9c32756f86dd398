"""RMSNorm with the addition to the residual stream before it, in one launch.

`workers.forward.projections.rms_norm` is the reference. One program computes one row, so no row depends on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NORM_WARPS = 4
"""Warps of a row, also in programs that multiply before they normalize: their number decides the order of a sum."""


def normalize(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of `rows` `[rows, dim]`, contiguous."""
    output = torch.empty_like(rows)
    _launch(rows, rows, weight, epsilon, rows, output, adds=False)
    return output


def add_and_normalize(
    rows: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows + added` `[rows, dim]`, contiguous, in their type, and the RMSNorm of that sum; in `out` if it is given."""
    sums, output = (torch.empty_like(rows), torch.empty_like(rows)) if out is None else out
    _launch(rows, added, weight, epsilon, sums, output, adds=True)
    return sums, output


def _launch(
    rows: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    sums: torch.Tensor,
    output: torch.Tensor,
    *,
    adds: bool,
) -> None:
    count, dim = rows.shape
    normalize_rows[(count,)](
        rows, added, weight, sums, output, epsilon,
        DIM=dim, WIDTH=triton.next_power_of_2(dim), ADDS=adds, num_warps=NORM_WARPS,
    )  # fmt: skip


@triton.jit
def normalize_rows(
    rows, added, weight, sums, output, epsilon, DIM: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr
):
    """Add and normalize one row. The sum is rounded before it is normalized, as the residual stream is stored.

    The normalized numbers are rounded to the weight's type before it multiplies them.
    """
    row = tl.program_id(0).to(tl.int64) * DIM
    dim = tl.arange(0, WIDTH)
    is_dim = dim < DIM
    number = tl.load(rows + row + dim, mask=is_dim, other=0.0)
    kind = number.dtype
    if ADDS:
        more = tl.load(added + row + dim, mask=is_dim, other=0.0)
        number = (number.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(sums + row + dim, number, mask=is_dim)
    store_normalized(number, weight, output + row, dim, epsilon, DIM)


@triton.jit
def store_normalized(number, weight, output, dim, epsilon, DIM: tl.constexpr):
    """Normalize the numbers of one row, and store them."""
    is_dim = dim < DIM
    wide = number.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + epsilon)
    scaled = (wide * scale).to(weight.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + dim, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(output + dim, (scaled * factor).to(number.dtype), mask=is_dim)
