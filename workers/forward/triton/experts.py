"""Triton kernels for the experts of a mixture: each token is multiplied with the matrices of its own experts alone.

The rows of an expert, one for each of its tokens, lie one after another and are multiplied in tiles. The device lists
the tiles, and the number of programs depends on the sizes alone. So the host never waits, and a CUDA graph can hold a
step. A token adds its experts in the order of its choice, without atomic additions.

Tensor cores multiply the outputs of a matrix as their rows and the tokens as their columns. So the number of tokens in
a tile changes neither the instruction nor the order in which a number is added up, and no token changes a bit of
another.

The module needs the package `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.forward.expert_choice import ExpertChoice
from workers.forward.triton.attention import product
from workers.forward.triton.norm import NORM_WARPS, store_normalized
from workers.forward.weights.experts import ClampedSwiglu, Gate, swiglu

NARROW_TILE, WIDE_TILE = 16, 64
"""Rows of a tile, where experts have few rows and where they have many."""
OUTPUTS = 64
"""Outputs of a matrix in a narrow tile: the rows of one instruction."""
_CHUNK = 1024
"""Choices that one iteration of the routing reads."""
_SUM = 1024
"""Outputs of a token that one program adds."""
_MOST_EXPONENT = 100
_SWIGLU, _CLAMPED = tl.constexpr(1), tl.constexpr(2)
"""Kinds of gates; 0 is none."""
_LARGEST = tl.constexpr(88.0)
"""Bound of an exponent, of which the exponential is a finite float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """A matrix and maybe a bias of each expert."""

    weights: torch.Tensor
    """`[experts, out, in]`, with contiguous inputs; in MXFP4 uint8 `[experts, out, in / 2]`, see `mxfp4_matrices`."""
    biases: torch.Tensor | None = None
    """`[experts, out]`, contiguous."""
    exponents: torch.Tensor | None = None
    """In MXFP4, int8 `[experts, in / 32, out]`, contiguous: the power of two of each block."""

    @property
    def inputs(self) -> int:
        """Inputs of a matrix, with those that are padding."""
        return self.weights.shape[2] * (1 if self.exponents is None else 2)


def mxfp4_matrices(values: torch.Tensor, exponents: torch.Tensor, biases: torch.Tensor | None) -> Matrices:
    """Matrices in MXFP4, as the kernels read them: 64 inputs lie in 32 bytes, the first 32 of them in their low halves.

    `values` are uint8 `[experts, out, in / 2]`, with two neighbouring inputs in a byte, and `exponents` int8
    `[experts, out, in / 32]`. An odd number of blocks is padded with zeros. Raises `ValueError` for exponents beyond
    those that kernels add to a number's own.
    """
    if int(exponents.min()) < -_MOST_EXPONENT or int(exponents.max()) > _MOST_EXPONENT:
        raise ValueError(f"exponents of MXFP4 are beyond {_MOST_EXPONENT}")
    experts, outputs, blocks = exponents.shape
    if blocks % 2:
        values = torch.nn.functional.pad(values, (0, 16))
        exponents = torch.nn.functional.pad(exponents, (0, 1))
    numbers = torch.stack((values & 15, values >> 4), -1).view(experts, outputs, -1, 2, 32)
    packed = (numbers[:, :, :, 0] | numbers[:, :, :, 1] << 4).flatten(2)
    return Matrices(packed, biases, exponents.transpose(1, 2).contiguous())


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The rows that each expert multiplies. int32 tensors on the device."""

    order: torch.Tensor
    """`[rows]`: the place in `[tokens, experts of a token]` of each row; experts in order."""
    rows: torch.Tensor
    """`[tokens, experts of a token]`: the row of each place; -1 for a number that is no expert's."""
    tiles: torch.Tensor
    """`[most tiles, 3]`: expert, first row, and the end of the expert's rows."""
    count: torch.Tensor
    """`[1]`: the number of tiles."""
    tile: int
    """Rows of a tile."""


class TritonExperts:
    """The experts of a layer, multiplied by the kernels."""

    def __init__(self, first: Matrices, second: Matrices, gate: Gate) -> None:
        """`first` and `second` are read in place. Gates but `swiglu` and `ClampedSwiglu` are applied by torch."""
        self._first, self._second, self._gate = first, second, gate

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sums of its experts' outputs, `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`.
        """
        return add_experts(*self._products(x, chosen), weights)

    def mix_add_and_normalize(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        stream: torch.Tensor,
        norm: tuple[torch.Tensor, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream` `[tokens, hidden]`, contiguous, plus what `mix` returns, and the RMSNorm of that sum.

        `norm` is the norm's weight and epsilon.
        """
        products, routing = self._products(x, chosen)
        return add_experts_and_normalize(products, routing, weights, stream, norm)

    def _products(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """The outputs of the chosen experts, `[rows, hidden]`, and their places."""
        routing = route(chosen, len(self._first.weights))
        is_fused = self._gate is swiglu or isinstance(self._gate, ClampedSwiglu)
        inner = multiply_grouped(x, self._first, routing, each=chosen.shape[1], gate=self._gate if is_fused else None)
        if not is_fused:
            inner = self._gate(inner).contiguous()
        return multiply_grouped(inner, self._second, routing), routing


def choose(logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
    """What `choice.of` returns for `logits` `[tokens, experts]`, in one launch. Of equal ones the first is chosen."""
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, choice.each), dtype=torch.float32 if choice.is_wide else logits.dtype)
    chosen = torch.empty((tokens, choice.each), dtype=torch.int64, device=logits.device)
    choose_experts[(tokens,)](
        logits, weights, chosen, logits.stride(0),
        EXPERTS=experts, WIDTH=triton.next_power_of_2(experts), EACH=choice.each,
        EACH_WIDTH=triton.next_power_of_2(choice.each), OF_ALL=choice.is_of_all, num_warps=1,
    )  # fmt: skip
    return weights, chosen


def tile_of(rows: int, experts: int) -> int:
    """Rows of a tile, for `rows` rows of all experts."""
    return NARROW_TILE if rows <= NARROW_TILE * experts else WIDE_TILE


def route(chosen: torch.Tensor, experts: int) -> Routing:
    """The routing of `chosen` `[tokens, experts of a token]`, computed on the device in one launch."""
    rows = chosen.numel()
    tile = tile_of(rows, experts)
    most = min(rows, rows // tile + experts)  # tiles that suffice, however tokens choose
    order, places, tiles, count = (
        torch.empty(shape, dtype=torch.int32, device=chosen.device)
        for shape in ((rows,), chosen.shape, (most, 3), (1,))
    )
    route_expert[(experts,)](
        chosen.contiguous(), order, places, tiles, count, rows,
        EXPERTS=experts, BINS=2 * triton.next_power_of_2(experts), TILE=tile,
        CHUNK=_CHUNK,
    )  # fmt: skip
    return Routing(order, places, tiles, count, tile)


def warps_of(tile: int) -> int:
    """Warps of a program with tiles of so many rows."""
    return 8 if tile == WIDE_TILE else 4


def outputs_of(tile: int) -> int:
    """Outputs of the tiles of so many rows."""
    return 2 * OUTPUTS if tile == WIDE_TILE else OUTPUTS


def multiply_grouped(
    x: torch.Tensor, matrices: Matrices, routing: Routing, *, each: int = 0, gate: Gate | None = None
) -> torch.Tensor:
    """The products of all rows, `[rows, out]`, or with a gate what it makes of them.

    `x` is `[rows, in]`, contiguous; with `each`, the experts of a token, it is `[tokens, in]`.
    """
    weights, biases, exponents = matrices.weights, matrices.biases, matrices.exponents
    outputs = weights.shape[1]
    output = x.new_empty((len(routing.order), outputs if gate is None else outputs // 2))
    tile, clamped = routing.tile, gate if isinstance(gate, ClampedSwiglu) else None
    multiply_tiles[(triton.cdiv(outputs, outputs_of(tile)), len(routing.tiles))](
        x, weights, weights if exponents is None else exponents, weights if biases is None else biases,
        output, routing.order, routing.tiles, routing.count,
        1.0 if clamped is None else clamped.alpha, 0.0 if clamped is None else clamped.limit,
        x.stride(0), weights.stride(0), weights.stride(1),
        EACH=each, INPUTS=x.shape[1], OUTPUTS=outputs, TILE=tile, ROWS=outputs_of(tile), STEP=step_of(tile),
        BLOCKS=0 if exponents is None else exponents.shape[1],
        GATE=0 if gate is None else 1 if clamped is None else 2, HAS_BIAS=biases is not None,
        EXACT=x.dtype == torch.float32 or not x.is_cuda,  # the interpreter has no products of bfloat16
        num_warps=warps_of(tile), num_stages=stages_of(tile),
    )  # fmt: skip
    return output


def step_of(tile: int) -> int:
    """Inputs of one iteration, for tiles of so many rows."""
    return 128 if tile == NARROW_TILE else 64


def stages_of(tile: int) -> int:
    """Iterations whose numbers are loaded ahead, for tiles of so many rows."""
    return 4 if tile == NARROW_TILE else 3


def add_experts(products: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sums `[tokens, out]` of products `[rows, out]`. `weights` are `[tokens, experts of a token]`."""
    tokens, each = weights.shape
    width = products.shape[1]
    output = products.new_empty((tokens, width))
    add_rows[(tokens, triton.cdiv(width, _SUM))](
        products, routing.rows, weights.contiguous(), output, EACH=each, WIDTH=width, COLUMNS=_SUM
    )
    return output


def add_experts_and_normalize(
    products: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    stream: torch.Tensor,
    norm: tuple[torch.Tensor, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`stream` `[tokens, out]` plus the sums of `add_experts`, and the RMSNorm of that, in one launch."""
    tokens, each = weights.shape
    width = products.shape[1]
    sums, normalized = torch.empty_like(stream), torch.empty_like(stream)
    add_rows_and_normalize[(tokens,)](
        products, routing.rows, weights.contiguous(), stream, norm[0], sums, normalized, norm[1],
        EACH=each, DIM=width, WIDTH=triton.next_power_of_2(width), num_warps=NORM_WARPS,
    )  # fmt: skip
    return sums, normalized


@triton.jit
def choose_experts(
    logits, weights, chosen, row, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr,
    EACH_WIDTH: tl.constexpr, OF_ALL: tl.constexpr,
):  # fmt: skip
    """The experts of one token with the largest logits, the largest first, and their shares of a softmax."""
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, WIDTH), tl.arange(0, EACH_WIDTH)
    logit = tl.load(logits + token * row + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    largest = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - largest), axis=0)
    best, bests = tl.zeros([EACH_WIDTH], tl.float32), tl.zeros([EACH_WIDTH], tl.int64)
    for one in range(EACH):
        value = tl.max(logit, axis=0)
        index = tl.min(tl.where(logit == value, expert, WIDTH), axis=0)
        best = tl.where(place == one, tl.exp(value - largest), best)
        bests = tl.where(place == one, index.to(tl.int64), bests)
        logit = tl.where(expert == index, float("-inf"), logit)
    if not OF_ALL:
        total = tl.sum(best, axis=0)
    to = token * EACH + place
    tl.store(weights + to, (best / total).to(weights.dtype.element_ty), mask=place < EACH)
    tl.store(chosen + to, bests, mask=place < EACH)


@triton.jit(do_not_specialize=["rows"])
def route_expert(
    chosen, order, places, tiles, count, rows,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the rows and the tiles of one expert. Every program counts the rows of all experts before its own."""
    expert = tl.program_id(0)
    entry, number = tl.arange(0, CHUNK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, rows, CHUNK):
        one = tl.load(chosen + begin + entry, mask=begin + entry < rows, other=EXPERTS)
        counts += tl.histogram(tl.where((one >= 0) & (one < EXPERTS), one, EXPERTS).to(tl.int32), BINS)
    counts = tl.where(number < EXPERTS, counts, 0)
    own = tl.sum(tl.where(number == expert, counts, 0), axis=0)
    first = tl.sum(tl.where(number < expert, counts, 0), axis=0)
    numbers = (counts + TILE - 1) // TILE
    tile = tl.sum(tl.where(number < expert, numbers, 0), axis=0)
    for index in range((own + TILE - 1) // TILE):
        tl.store(tiles + 3 * (tile + index), expert)
        tl.store(tiles + 3 * (tile + index) + 1, first + index * TILE)
        tl.store(tiles + 3 * (tile + index) + 2, first + own)
    if expert == EXPERTS - 1:
        tl.store(count, tile + (own + TILE - 1) // TILE)
    for begin in range(0, rows, CHUNK):
        one = tl.load(chosen + begin + entry, mask=begin + entry < rows, other=EXPERTS)
        is_own = one == expert
        row = first + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(order + row, begin + entry, mask=is_own)
        tl.store(places + begin + entry, row, mask=is_own)
        if expert == 0:
            is_none = ((one < 0) | (one >= EXPERTS)) & (begin + entry < rows)
            tl.store(places + begin + entry, tl.full([CHUNK], -1, tl.int32), mask=is_none)
        first += tl.sum(is_own.to(tl.int32), axis=0)


@triton.jit
def multiply_tiles(
    x, matrices, exponents, biases, output, order, tiles, count, alpha, limit, x_row, matrix_expert, matrix_output,
    EACH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, BLOCKS: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Some outputs of one expert for one tile of its rows. A gate's outputs lie beside those that it multiplies."""
    tile = tl.program_id(1)
    if tile < tl.load(count):
        expert = tl.load(tiles + 3 * tile)
        row = tl.load(tiles + 3 * tile + 1) + tl.arange(0, TILE)
        is_row = row < tl.load(tiles + 3 * tile + 2)
        source = row
        if EACH > 0:
            source = tl.load(order + row, mask=is_row, other=0) // EACH
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_output = place < OUTPUTS
        number = place
        if GATE == _SWIGLU:  # gates are the first half
            number = place // 2 + place % 2 * (OUTPUTS // 2)
        number = tl.where(is_output, number, 0)
        own = matrices + expert.to(tl.int64) * matrix_expert + number[:, None] * matrix_output
        rows = x + source.to(tl.int64)[:, None] * x_row
        if BLOCKS > 0:
            powers = exponents + expert.to(tl.int64) * (BLOCKS * OUTPUTS) + number
            sums = mxfp4_sums(own, powers, rows, is_output, is_row, INPUTS, OUTPUTS, TILE, ROWS, STEP, BLOCKS, EXACT)
        else:
            sums = plain_sums(own, rows, is_output, is_row, INPUTS, TILE, ROWS, STEP, EXACT)
        if HAS_BIAS:
            sums += tl.load(biases + expert * OUTPUTS + number, mask=is_output, other=0.0).to(tl.float32)[:, None]
        kind = output.dtype.element_ty
        if GATE == 0:
            to = output + row.to(tl.int64)[:, None] * OUTPUTS + place[None, :]
            tl.store(to, tl.trans(sums.to(kind)), mask=is_row[:, None] & is_output[None, :])
        else:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS // 2, 2, TILE)), (0, 2, 1)))
            result = gated(gate, up, alpha, limit, GATE)
            column = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            to = output + row.to(tl.int64)[:, None] * (OUTPUTS // 2) + column[None, :]
            tl.store(to, tl.trans(result.to(kind)), mask=is_row[:, None] & (column < OUTPUTS // 2)[None, :])


@triton.jit
def plain_sums(
    own, rows, is_output, is_row, INPUTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The products of a tile of outputs and a tile of rows, float32 `[ROWS, TILE]`."""
    inputs = tl.arange(0, STEP)[None, :]
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for begin in range(0, INPUTS, STEP):
        is_weight, is_number = is_output[:, None], is_row[:, None]
        if INPUTS % STEP:
            is_weight = is_weight & (begin + inputs < INPUTS)
            is_number = is_number & (begin + inputs < INPUTS)
        weight = tl.load(own + begin + inputs, mask=is_weight, other=0.0)
        factor = tl.load(rows + begin + inputs, mask=is_number, other=0.0)
        sums += product(weight, tl.trans(factor), EXACT)
    return sums


@triton.jit
def mxfp4_sums(
    own, powers, rows, is_output, is_row, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, BLOCKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The products with matrices in MXFP4, which are widened in registers, float32 `[ROWS, TILE]`."""
    inputs = tl.arange(0, 32)[None, :]
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for begin in range(0, 32 * BLOCKS, STEP):
        for part in tl.static_range(0, STEP, 64):
            first = begin + part
            is_weight = is_output[:, None]
            if (32 * BLOCKS) % STEP:
                is_weight = is_weight & (first + inputs < 32 * BLOCKS)
            packed = tl.load(own + first // 2 + inputs, mask=is_weight, other=0).to(tl.int16)
            for half in tl.static_range(2):
                place = first + 32 * half + inputs
                is_factor = is_row[:, None]
                if INPUTS % STEP:
                    is_factor = is_factor & (place < INPUTS)
                block = tl.minimum(first // 32 + half, BLOCKS - 1)
                power = tl.load(powers + block * OUTPUTS, mask=is_output, other=0).to(tl.int16)
                weight = widened((packed >> (4 * half)) & 15, power[:, None])
                sums += product(weight, tl.trans(tl.load(rows + place, mask=is_factor, other=0.0)), EXACT)
    return sums


@triton.jit
def widened(value, power):
    """Numbers of 4 bits (E2M1) times powers of two, exact in bfloat16."""
    size, exponent = value & 7, ((value >> 1) & 3) + 126 + power
    bits = (exponent << 7) | tl.where(size > 1, (value & 1) << 6, 0)  # the one number below the least power is 0.5
    bits = tl.where(size == 0, 0, bits) | ((value >> 3) << 15)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """What a gate makes of its numbers and those that it multiplies, in float32."""
    if GATE == _CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    return gate / (1.0 + tl.exp(tl.minimum(-gate * alpha, _LARGEST))) * up


@triton.jit
def add_rows(products, rows, weights, output, EACH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The weighted sum of one token's products, in the order of its choice."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = weighted_sum(products, rows, weights, token, column, EACH, WIDTH, COLUMNS)
    tl.store(output + token * WIDTH + column, sums.to(output.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def add_rows_and_normalize(
    products, rows, weights, stream, norm, sums, normalized, epsilon,
    EACH: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The weighted sum of one token's products, added to the residual stream, and its RMSNorm. It is rounded before."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column, place = column < DIM, token * DIM + column
    held = tl.load(stream + place, mask=is_column, other=0.0)
    added = weighted_sum(products, rows, weights, token, column, EACH, DIM, WIDTH).to(held.dtype)
    number = (held.to(tl.float32) + added.to(tl.float32)).to(held.dtype)
    tl.store(sums + place, number, mask=is_column)
    store_normalized(number, norm, normalized + token * DIM, column, epsilon, DIM)


@triton.jit
def weighted_sum(
    products, rows, weights, token, column, EACH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some columns of the weighted sum of one token's products, in the order of its choice, float32 `[COLUMNS]`."""
    sums = tl.zeros([COLUMNS], tl.float32)
    for one in range(EACH):
        row = tl.load(rows + token * EACH + one).to(tl.int64)
        weight = tl.load(weights + token * EACH + one).to(tl.float32)
        is_number = column < tl.where(row < 0, 0, WIDTH)
        sums += weight * tl.load(products + row * WIDTH + column, mask=is_number, other=0.0).to(tl.float32)
    return sums
