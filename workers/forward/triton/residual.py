"""Products with plain matrices in fixed splits, and what follows them: the residual stream, and its RMSNorm.

`torch.nn.functional.linear` and then `workers.forward.triton.norm.add_and_normalize` are the reference, with their
roundings. A library chooses by the number of rows into how many splits it divides the inputs, and other splits add in
another order. Here the splits depend on the matrix alone. Tensor cores multiply the outputs of a matrix as their rows
and the tokens as their columns, so the number of rows changes neither the instruction nor the order of a sum.

For few rows, each split is computed by a program of its own. The last one of a tile adds the splits in order, and the
last one of all outputs of a row normalizes it. For more rows, a program computes all splits in turn.

What is multiplied may be `silu(gates) * values`, computed as it is loaded and rounded as
`workers.forward.triton.gate.silu_mul` rounds it. That saves a launch, and each program reads both: it is for few rows.

The module needs the package `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.forward.projections import Gated
from workers.forward.triton.gate import gated
from workers.forward.triton.norm import NORM_WARPS, normalize, store_normalized
from workers.forward.triton.tiles import MOST_NORMALIZED

_FEW_ROWS, _SOME_ROWS, _MOST_APART = 16, 32, 128
_PROGRAMS, _LEAST_SPLIT = 256, 512
"""Programs that keep a device busy, and the fewest inputs of a split."""
_STEP = 128
"""Inputs of a split are a multiple of this."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the products of some number of rows are computed."""

    rows: int
    """Rows of a tile."""
    outputs: int
    step: int
    """Inputs of one iteration."""
    warps: int
    stages: int
    is_apart: bool
    """Whether each split is a program of its own."""
    normalizes: bool
    """Whether the last program of a row normalizes it."""


def tiles_of(rows: int) -> Tiles:
    """The tiles for a number of rows."""
    if rows <= _FEW_ROWS:
        return Tiles(16, 64, _STEP, NORM_WARPS, 4, is_apart=True, normalizes=rows <= MOST_NORMALIZED)
    if rows <= _SOME_ROWS:
        return Tiles(32, 64, _STEP, NORM_WARPS, 4, is_apart=True, normalizes=False)
    if rows <= _MOST_APART:
        return Tiles(64, 64, _STEP, NORM_WARPS, 3, is_apart=True, normalizes=False)
    return Tiles(128, 128, 64, 8, 3, is_apart=False, normalizes=False)


def splits_of(outputs: int, inputs: int) -> int:
    """Into how many splits the inputs of a matrix are divided, by its shape alone."""
    wanted = -(-_PROGRAMS // -(-outputs // tiles_of(1).outputs))
    return max(1, min(wanted, inputs // _LEAST_SPLIT))


def counters_for(outputs: int, device: torch.device) -> torch.Tensor:
    """Zeros for the tiles of all launches whose splits are apart, int32."""
    tiles = max(-(-rows // tiles_of(rows).rows) for rows in (_FEW_ROWS, _SOME_ROWS, _MOST_APART))
    return torch.zeros(tiles * (-(-outputs // tiles_of(1).outputs) + 1), dtype=torch.int32, device=device)


def multiply(
    x: torch.Tensor | Gated, weight: torch.Tensor, bias: torch.Tensor | None, counters: torch.Tensor
) -> torch.Tensor:
    """`x` `[rows, in]`, with contiguous inputs, times `weight` `[out, in]` with contiguous inputs: `[rows, out]`.

    `bias` is `[out]`. `counters` are those of `counters_for`, and 0 again after each launch.
    """
    output = weight.new_empty((_rows(x), len(weight)))
    _launch(x, weight, bias, counters, (output, None, None, 0.0), output)
    return output


def multiply_add_and_normalize(
    x: torch.Tensor | Gated,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    stream: torch.Tensor,
    norm: tuple[torch.Tensor, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`stream` `[rows, out]`, contiguous, plus the product of `multiply`, and the RMSNorm of that sum.

    `norm` is the weight `[out]` and epsilon.
    """
    sums = torch.empty_like(stream)
    if not tiles_of(_rows(x)).normalizes:
        _launch(x, weight, bias, counters, (stream, None, None, 0.0), sums)
        return sums, normalize(sums, *norm)
    normalized = torch.empty_like(stream)
    _launch(x, weight, bias, counters, (stream, normalized, *norm), sums)
    return sums, normalized


def _rows(x: torch.Tensor | Gated) -> int:
    return x.tokens if isinstance(x, Gated) else len(x)


def _launch(
    x: torch.Tensor | Gated,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    after: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float],
    output: torch.Tensor,
) -> None:
    """`after` is the residual stream, or `output` for none, and what is normalized, the norm's weight and epsilon."""
    gates, values = (x.gates, x.values) if isinstance(x, Gated) else (x, x)
    rows, inputs = gates.shape
    outputs = len(weight)
    stream, normalized, norm, epsilon = after
    tiles, splits = tiles_of(rows), splits_of(outputs, inputs)
    is_apart = tiles.is_apart and splits > 1
    partial = output
    if is_apart:
        partial = torch.empty((splits, rows, outputs), dtype=torch.float32, device=weight.device)
    grid = (triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows), splits if is_apart else 1)
    multiply_splits[grid](
        gates, values, weight, output if bias is None else bias, stream, output if norm is None else norm,
        output, output if normalized is None else normalized, partial, counters, rows, epsilon,
        gates.stride(0), values.stride(0), weight.stride(0),
        INPUTS=inputs, OUTPUTS=outputs, WIDTH=triton.next_power_of_2(outputs), SPLITS=splits,
        PER_SPLIT=triton.cdiv(triton.cdiv(inputs, splits), _STEP) * _STEP, ROWS=tiles.rows, TILE=tiles.outputs,
        STEP=tiles.step, IS_APART=is_apart, HAS_BIAS=bias is not None, ADDS=stream is not output,
        NORMALIZES=normalized is not None, GATED=gates is not values,
        EXACT=weight.dtype == torch.float32 or not weight.is_cuda,  # the interpreter has no products of bfloat16
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "epsilon"])
def multiply_splits(
    gates, values, weight, bias, stream, norm, output, normalized, partial, counters, rows, epsilon,
    gate_row, value_row, weight_row,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PER_SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, IS_APART: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, NORMALIZES: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Some outputs of some rows, or one split of their inputs. What is not gated is in the place of the gates."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = place < OUTPUTS, row < rows
    own = weight + tl.where(is_output, place, 0).to(tl.int64)[:, None] * weight_row
    own_row = tl.where(is_row, row, 0).to(tl.int64)[:, None]
    gate, value = gates + own_row * gate_row, values + own_row * value_row
    to = row.to(tl.int64)[None, :] * OUTPUTS + place[:, None]
    is_number = is_output[:, None] & is_row[None, :]
    counter = counters + tl.program_id(1) * (tl.num_programs(0) + 1)
    if IS_APART:
        split = tl.program_id(2)
        total = sum_of_split(
            own, gate, value, is_row, split * PER_SPLIT, INPUTS, PER_SPLIT, STEP, TILE, ROWS, GATED, EXACT
        )
        span = tl.cast(rows, tl.int64) * OUTPUTS
        tl.store(partial + split * span + to, total, mask=is_number)
        is_last = arrives_last(counter + 1 + tl.program_id(0), SPLITS)
        if is_last:
            total = tl.zeros((TILE, ROWS), tl.float32)
            for number in range(SPLITS):
                total += tl.load(partial + number * span + to, mask=is_number, other=0.0, cache_modifier=".cg")
            finish(total, bias + place, stream + to, output + to, is_output, is_number, HAS_BIAS, ADDS)
    else:
        is_last = True
        total = tl.zeros((TILE, ROWS), tl.float32)
        for number in range(SPLITS):
            total += sum_of_split(
                own, gate, value, is_row, number * PER_SPLIT, INPUTS, PER_SPLIT, STEP, TILE, ROWS, GATED, EXACT
            )
        finish(total, bias + place, stream + to, output + to, is_output, is_number, HAS_BIAS, ADDS)
    if NORMALIZES:  # noqa: SIM102 - decided by the compiler
        if is_last:  # noqa: SIM102
            if arrives_last(counter, tl.num_programs(0)):
                first = tl.program_id(1) * ROWS
                normalize_tile(output, normalized, norm, first, tl.minimum(first + ROWS, rows), epsilon, OUTPUTS, WIDTH)


@triton.jit
def normalize_tile(output, normalized, norm, first, end, epsilon, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr):
    """Normalize some rows, one after another."""
    dim = tl.arange(0, WIDTH)
    for row in range(first, end):
        begin = tl.cast(row, tl.int64) * OUTPUTS
        numbers = tl.load(output + begin + dim, mask=dim < OUTPUTS, other=0.0, cache_modifier=".cg")
        store_normalized(numbers, norm, normalized + begin, dim, epsilon, OUTPUTS)


@triton.jit
def sum_of_split(
    own, gate, value, is_row, begin, INPUTS: tl.constexpr, PER_SPLIT: tl.constexpr, STEP: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The products of one split of the inputs, added in their order, float32 `[TILE, ROWS]`."""
    inputs = begin + tl.arange(0, STEP)[None, :]
    sums = tl.zeros((TILE, ROWS), tl.float32)
    for step in range(0, PER_SPLIT, STEP):
        place = step + inputs
        is_input = place < INPUTS
        left = tl.load(own + place, mask=is_input, other=0.0)
        right = tl.load(gate + place, mask=is_row[:, None] & is_input, other=0.0)
        if GATED:
            right = gated(right, tl.load(value + place, mask=is_row[:, None] & is_input, other=0.0))
        if EXACT:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    return sums


@triton.jit
def finish(total, bias, stream, output, is_output, is_number, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """Round the sums, add the bias before and the residual stream after, and store them."""
    kind = output.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias, mask=is_output, other=0.0).to(tl.float32)[:, None]
    total = total.to(kind)
    if ADDS:
        total = (tl.load(stream, mask=is_number, other=0.0).to(tl.float32) + total.to(tl.float32)).to(kind)
    tl.store(output, total, mask=is_number)


@triton.jit
def arrives_last(counter, count):
    """Whether this is the last of `count` programs to come here. All of them then see what the others have stored.

    The counter is 0 before and after.
    """
    tl.debug_barrier()  # all threads have stored their numbers
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last
