"""Triton kernels for the experts of a mixture: each token is multiplied with the matrices of its own experts alone.

The rows of an expert, one for each of its tokens, lie one after another and are multiplied in tiles. Programs find the
expert of their tile on the device, and their number depends on the sizes alone. So the host never waits, and a CUDA
graph can hold a step. A token adds its experts in the order of its choice, without atomic additions.

The module needs the package `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.forward.triton.attention import product
from workers.forward.weights.experts import Gate, swiglu

NARROW_TILE, WIDE_TILE = 16, 64
"""Rows of a tile, where experts have few rows and where they have many."""
COLUMNS, STEP = 64, 64
"""Outputs of a tile, and inputs of one iteration."""
_SUM = 1024
"""Outputs of a token that one program adds."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """A matrix and maybe a bias of each expert."""

    weights: torch.Tensor
    """`[experts, out, in]`, with any strides."""
    biases: torch.Tensor | None = None
    """`[experts, out]`, contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which rows an expert multiplies. int32, on the device."""

    order: torch.Tensor
    """`[rows]`: the token's place in `[tokens, experts of a token]` of each row; experts in order."""
    rows: torch.Tensor
    """`[tokens, experts of a token]`: the row of each place."""
    ends: torch.Tensor
    """`[experts]`: the end of an expert's rows."""
    tile_ends: torch.Tensor
    """`[experts]`: the end of an expert's tiles."""
    tile: int
    """Rows of a tile."""

    @property
    def most_tiles(self) -> int:
        """Tiles that suffice, however tokens choose."""
        rows, experts = len(self.order), len(self.ends)
        return min(rows, rows // self.tile + experts)


def route(chosen: torch.Tensor, experts: int) -> Routing:
    """The routing of `chosen` `[tokens, experts of a token]`, computed on the device."""
    flat = chosen.flatten()
    tile = NARROW_TILE if len(flat) <= NARROW_TILE * experts else WIDE_TILE
    order = torch.argsort(flat, stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = (flat[:, None] == torch.arange(experts, device=flat.device)).sum(0)
    ends, tile_ends = counts.cumsum(0), ((counts + tile - 1) // tile).cumsum(0)
    return Routing(order.int(), rows.int(), ends.int(), tile_ends.int(), tile)


class TritonExperts:
    """The experts of a layer, multiplied by the kernels."""

    def __init__(self, first: ExpertMatrices, second: ExpertMatrices, gate: Gate) -> None:
        """The kernels apply `swiglu` themselves, and torch any other gate."""
        self._first, self._second, self._gate = first, second, gate

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sums of its experts' outputs, `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`.
        """
        routing = route(chosen, len(self._first.weights))
        is_gated = self._gate is swiglu
        inner = multiply_grouped(x, self._first, routing, each=chosen.shape[1], is_gated=is_gated)
        if not is_gated:
            inner = self._gate(inner).contiguous()
        return add_experts(multiply_grouped(inner, self._second, routing), routing, weights.contiguous())


def warps_of(tile: int) -> int:
    """Warps of a program with tiles of so many rows."""
    return 8 if tile == WIDE_TILE else 4


def multiply_grouped(
    x: torch.Tensor, matrices: ExpertMatrices, routing: Routing, *, each: int = 0, is_gated: bool = False
) -> torch.Tensor:
    """The products of all rows, `[rows, out]`, or with `is_gated` SiLU of the first half times the second half.

    `x` is `[rows, in]`; with `each`, the experts of a token, it is `[tokens, in]`.
    """
    weights, biases = matrices.weights, matrices.biases
    experts, outputs, inputs = weights.shape
    width = outputs // 2 if is_gated else outputs
    output = x.new_empty((len(routing.order), width))
    multiply_tiles[(routing.most_tiles, triton.cdiv(width, COLUMNS))](
        x, weights, weights if biases is None else biases, output,
        routing.order, routing.ends, routing.tile_ends,
        x.stride(0), *weights.stride(), output.stride(0),
        EXPERTS=experts, EXPERTS_TILE=triton.next_power_of_2(experts), EACH=each,
        INPUTS=inputs, OUTPUTS=outputs, WIDTH=width, TILE=routing.tile, COLUMNS=COLUMNS, STEP=STEP,
        IS_GATED=is_gated, HAS_BIAS=biases is not None,
        EXACT=x.dtype == torch.float32 or not x.is_cuda,  # the interpreter has no products of bfloat16
        num_warps=warps_of(routing.tile),
    )  # fmt: skip
    return output


def add_experts(products: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sums `[tokens, out]` of products `[rows, out]`. `weights` are `[tokens, experts of a token]`."""
    tokens, each = weights.shape
    width = products.shape[1]
    output = products.new_empty((tokens, width))
    add_rows[(tokens, triton.cdiv(width, _SUM))](
        products, routing.rows, weights, output, EACH=each, WIDTH=width, COLUMNS=_SUM
    )
    return output


@triton.jit
def multiply_tiles(
    x, matrices, biases, output, order, ends, tile_ends,
    x_row, matrix_expert, matrix_output, matrix_input, output_row,
    EXPERTS: tl.constexpr, EXPERTS_TILE: tl.constexpr, EACH: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert, times some of its outputs."""
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    experts = tl.arange(0, EXPERTS_TILE)
    known = tl.load(tile_ends + experts, mask=experts < EXPERTS, other=2147483647)
    expert = tl.sum((known <= tile).to(tl.int32), axis=0)
    if expert < EXPERTS:
        before = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        row = first + (tile - before) * TILE + tl.arange(0, TILE)
        is_row, is_column = row < tl.load(ends + expert), column < WIDTH
        source = row
        if EACH > 0:
            source = tl.load(order + row, mask=is_row, other=0) // EACH
        own = matrices + expert.to(tl.int64) * matrix_expert
        sums = tl.zeros([TILE, COLUMNS], tl.float32)
        second = tl.zeros([TILE, COLUMNS], tl.float32)
        for begin in range(0, INPUTS, STEP):
            inputs = begin + tl.arange(0, STEP)
            is_input = inputs < INPUTS
            place = x + source.to(tl.int64)[:, None] * x_row + inputs[None, :]
            factors = tl.load(place, mask=is_row[:, None] & is_input[None, :], other=0.0)
            block = own + column[None, :] * matrix_output + inputs[:, None] * matrix_input
            is_weight = is_input[:, None] & is_column[None, :]
            sums += product(factors, tl.load(block, mask=is_weight, other=0.0), EXACT)
            if IS_GATED:
                ups = tl.load(block + WIDTH * matrix_output, mask=is_weight, other=0.0)
                second += product(factors, ups, EXACT)
        if HAS_BIAS:
            bias = biases + expert * OUTPUTS + column
            sums += tl.load(bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if IS_GATED:
                second += tl.load(bias + WIDTH, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            sums = sums / (1.0 + tl.exp(-sums)) * second
        to = output + row.to(tl.int64)[:, None] * output_row + column[None, :]
        tl.store(to, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_rows(products, rows, weights, output, EACH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The weighted sum of one token's products, in the order of its choice."""
    token, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for one in range(EACH):
        row = tl.load(rows + token * EACH + one).to(tl.int64)
        weight = tl.load(weights + token * EACH + one).to(tl.float32)
        sums += weight * tl.load(products + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(output + token.to(tl.int64) * WIDTH + column, sums.to(output.dtype.element_ty), mask=column < WIDTH)
