"""Products with matrices of 4 or 8 bits in groups, which are widened in registers.

`GroupStorage.dequantized` is the reference. `workers.forward.weights.words` says how the values lie in memory: one
position in the words of a step is a chunk of neighbouring inputs, and tensor cores multiply chunk by chunk. Integer
operations put a value into the bits of a float. The scale of a group multiplies the sum of its products, in float32.

No row's bits depend on the other rows or on their number: the same instruction adds the same products in one order.
The inputs are divided into splits, whose number depends on the matrix alone. For few rows, each split is computed by a
program of its own, and the last one to end adds all of them in order. For more rows, a program computes all splits in
turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.weights.words import BLOCK, LaunchShape, Values, Words, launch_shape

_INTEGERS4, _INTEGERS8 = tl.constexpr(int(Values.INTEGERS4)), tl.constexpr(int(Values.INTEGERS8))
_E4M3, _E2M1 = tl.constexpr(int(Values.E4M3)), tl.constexpr(int(Values.E2M1))
_TABLE = tl.constexpr(int(Values.TABLE))
_RUNTIME = ["rows", "steps", "splits", "group_steps"]
"""Arguments whose values must not make the compiler write code of their own."""


def multiply(
    x: torch.Tensor, matrix: Words, bias: torch.Tensor | None, shape: LaunchShape | None = None
) -> torch.Tensor:
    """`x` `[rows, inputs]`, contiguous, times the matrix: `[rows, outputs]` in the type of `x`.

    `bias` is `[outputs]`, and a table has the type of `x`. `shape` is that of `launch_shape` unless it is given.
    """
    rows = len(x)
    shape = shape or launch_shape(rows)
    tiles = triton.cdiv(rows, shape.rows)
    output = torch.empty((rows, matrix.outputs), dtype=x.dtype, device=x.device)
    apart = shape.splits_apart and matrix.splits > 1
    partial = output
    if apart:
        partial = torch.empty((matrix.splits, rows, matrix.outputs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(matrix.outputs, shape.outputs), tiles, matrix.splits if apart else 1)
    multiply_groups[grid](
        x, matrix.words, matrix.scale, matrix.scale if matrix.offset is None else matrix.offset,
        matrix.scale if matrix.units is None else matrix.units,
        matrix.scale if matrix.table is None else matrix.table,
        output if bias is None else bias, output, partial, matrix.counters,
        rows, matrix.outputs, matrix.inputs, matrix.steps, matrix.splits, matrix.group_steps, matrix.zero,
        SUPER=matrix.super_groups, GROUP=matrix.step_group, CHUNK=matrix.chunk, VALUES=int(matrix.values),
        HAS_OFFSET=matrix.offset is not None,
        HAS_MINIMUM=matrix.has_minimum, HAS_ZERO=matrix.has_zero, HAS_BIAS=bias is not None, HAS_TAIL=matrix.has_tail,
        IS_SPLIT=apart, ROWS=shape.rows, TILE=shape.outputs, BLOCK=BLOCK,
        EXACT=x.dtype == torch.float32 or not x.is_cuda,  # the interpreter computes nothing in bfloat16
        num_warps=shape.warps,
        num_stages=1 if matrix.table is not None and x.dtype == torch.float32 else shape.stages,  # it would be copied
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=_RUNTIME)
def multiply_groups(
    x, words, scales, offsets, units, table, bias, output, partial, counters,
    rows, outputs, inputs, steps, splits, group_steps, zero,
    SUPER: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr,
    IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of some rows, or one split of their inputs."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row, is_column = row < rows, column < outputs
    lane = tl.arange(0, CHUNK)
    per_split = (steps + splits - 1) // splits
    block = tl.minimum(column // BLOCK, (outputs - 1) // BLOCK)  # a tile may be wider than the words
    places = words + block * (steps * BLOCK * CHUNK) + (column % BLOCK) * CHUNK
    places = places[None, :] + lane[:, None]  # [CHUNK, TILE]
    own = x + row.to(tl.int64)[:, None] * inputs + lane[None, :]  # [ROWS, CHUNK]
    total = tl.zeros((ROWS, TILE), tl.float32)
    for turn in range(1 if IS_SPLIT else splits):
        split = tl.program_id(2) if IS_SPLIT else turn
        total += sum_of_split(
            own, places, scales + column, offsets + column, units + column, table, is_row, is_column, lane,
            split * per_split, tl.minimum((split + 1) * per_split, steps), outputs, inputs, group_steps, zero,
            output.dtype.element_ty, SUPER, GROUP, CHUNK, VALUES, HAS_OFFSET, HAS_MINIMUM, HAS_ZERO, HAS_TAIL,
            ROWS, TILE, BLOCK, EXACT,
        )  # fmt: skip
    place = row.to(tl.int64)[:, None] * outputs + column[None, :]
    is_output = is_row[:, None] & is_column[None, :]
    if IS_SPLIT:
        apart = tl.cast(rows, tl.int64) * outputs
        tl.store(partial + tl.program_id(2) * apart + place, total, mask=is_output)
        tl.debug_barrier()  # all threads have stored their numbers
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            total = tl.zeros((ROWS, TILE), tl.float32)
            for split in range(splits):
                total += tl.load(partial + split * apart + place, mask=is_output, other=0.0, cache_modifier=".cg")
            finish(total, bias + column, output + place, is_column, is_output, HAS_BIAS)
            tl.store(counter, 0)
    else:
        finish(total, bias + column, output + place, is_column, is_output, HAS_BIAS)


@triton.jit
def sum_of_split(
    own, places, scales, offsets, units, table, is_row, is_column, lane,
    first_step, end_step, outputs, inputs, group_steps, zero, kind: tl.constexpr,
    SUPER: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_TAIL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The products of some steps, added in their order, float32 `[ROWS, TILE]`.

    What is subtracted from values, or added as a minimum, multiplies the sum of a group's inputs. That sum is a product
    with ones, so that its order is fixed as well.
    """
    each: tl.constexpr = 4 if VALUES == _INTEGERS8 else 4 if VALUES == _E4M3 else 8  # values of a word
    found = tl.zeros((ROWS, TILE), tl.float32)
    # The compiler loads no words ahead where the addresses of other loads depend on them.
    ahead = tl.load(places + tl.minimum(first_step, end_step - 1) * (BLOCK * CHUNK)) if VALUES == _TABLE else 0
    for step in range(first_step, end_step):
        loaded = ahead if VALUES == _TABLE else tl.load(places + step * (BLOCK * CHUNK))
        packed = loaded.to(tl.uint32, bitcast=True)  # type: ignore[union-attr]
        if VALUES == _TABLE:
            ahead = tl.load(places + tl.minimum(step + 1, end_step - 1) * (BLOCK * CHUNK))
        products = tl.zeros((ROWS, TILE), tl.float32)
        sums = tl.zeros((ROWS, 2 * ROWS), tl.float32)  # wider than high, which makes each warp compute other outputs
        for chunk in tl.static_range(each):
            first = step * (each * CHUNK) + chunk * CHUNK
            mask = is_row[:, None]
            if HAS_TAIL:
                mask = mask & (first + lane < inputs)[None, :]
            numbers = tl.load(own + first, mask=mask, other=0.0)
            if EXACT:
                numbers = numbers.to(tl.float32)
            weights = widened(packed, table, chunk, VALUES, tl.float16 if kind == tl.float16 else tl.bfloat16, EXACT)
            products = tl.dot(numbers, weights, products, input_precision="ieee")
            if HAS_MINIMUM or HAS_ZERO:
                sums = tl.dot(numbers, tl.full((CHUNK, 2 * ROWS), 1.0, numbers.dtype), sums, input_precision="ieee")
            if (chunk + 1) * CHUNK % GROUP == 0:
                group = step // group_steps * (each * CHUNK // GROUP) + chunk * CHUNK // GROUP
                if HAS_TAIL:
                    group = tl.minimum(group, (inputs - 1) // GROUP)  # a group of padding
                unit = units
                if SUPER > 0:
                    unit = units + group // SUPER * (2 if HAS_OFFSET else 1) * outputs
                scale = number_of(scales + group * outputs, unit, is_column, SUPER)
                found = tl.fma(products, scale[None, :], found)
                if HAS_MINIMUM or HAS_ZERO:
                    shift = scale * zero
                    if HAS_OFFSET:
                        offset = number_of(offsets + group * outputs, unit + outputs, is_column, SUPER)
                        shift = tl.fma(scale, zero, offset) if HAS_MINIMUM else scale * (zero - offset)
                    found = tl.fma(tl.max(sums, axis=1)[:, None], shift[None, :], found)  # all of a row are equal
                    sums = tl.zeros((ROWS, 2 * ROWS), tl.float32)
                products = tl.zeros((ROWS, TILE), tl.float32)
    return found


@triton.jit
def number_of(numbers, unit, is_column, SUPER: tl.constexpr):
    """Scales, zeros or minima of a group, float32 `[TILE]`: with super-blocks, integers times their unit."""
    found = tl.load(numbers, mask=is_column, other=0).to(tl.float32)
    if SUPER > 0:
        found *= tl.load(unit, mask=is_column, other=0.0).to(tl.float32)
    return found


@triton.jit
def finish(total, bias, output, is_column, is_output, HAS_BIAS: tl.constexpr):
    """Round the sums, and store them. A bias is added to rounded sums."""
    kind = output.dtype.element_ty
    if HAS_BIAS:
        added = tl.load(bias, mask=is_column, other=0.0).to(tl.float32)
        total = total.to(kind).to(tl.float32) + added[None, :]
    tl.store(output, total.to(kind), mask=is_output)


@triton.jit
def widened(packed, table, chunk: tl.constexpr, VALUES: tl.constexpr, kind: tl.constexpr, EXACT: tl.constexpr):
    """The values of one chunk as floats of 16 bits, or of 32 bits for `EXACT`. Integers of 4 bits are 16 too large."""
    is_half: tl.constexpr = kind == tl.float16
    if VALUES == _TABLE:
        return chosen(packed, table, chunk, EXACT)
    if VALUES == _INTEGERS8:
        # The bits of 2^23 + value; the words hold each integer 128 too large.
        whole = ((packed >> (8 * (chunk // 2 + chunk % 2 * 2))) & 0xFF) | 0x4B000000
        return (whole.to(tl.float32, bitcast=True) - 8388736.0).to(tl.float32 if EXACT else kind)
    if VALUES == _INTEGERS4:
        # 16 + value is 16 * (1 + value / 16): its bits are those of 16, and the value in the mantissa's highest bits.
        shift: tl.constexpr = chunk // 2 * 4 - (6 if is_half else 3)
        moved = packed >> shift if shift >= 0 else packed << -shift
        both = (moved & (0x03C003C0 if is_half else 0x00780078)) | (0x4C004C00 if is_half else 0x41804180)
        return half(both, chunk, kind, EXACT)
    # Floats keep their bits. Their exponents have another bias, so a power of two is missing.
    if VALUES == _E4M3:
        moved = packed >> (chunk // 2 * 8)
        both = ((moved & 0x007F007F) << (7 if is_half else 4)) | ((moved & 0x00800080) << 8)
        number = half(both, chunk, kind, EXACT)
        return number * tl.full((1, 1), 256.0 if is_half else 2.0**120, number.dtype)
    moved = packed >> (chunk // 2 * 4)
    both = ((moved & 0x00070007) << (9 if is_half else 6)) | ((moved & 0x00080008) << 12)
    number = half(both, chunk, kind, EXACT)
    return number * tl.full((1, 1), 16384.0 if is_half else 2.0**126, number.dtype)


@triton.jit
def chosen(packed, table, chunk: tl.constexpr, EXACT: tl.constexpr):
    """The numbers of one chunk that values choose from a table of 16, which the nearest cache holds."""
    shift: tl.constexpr = chunk // 2 * 4 + chunk % 2 * 16
    number = tl.load(table + ((packed >> shift) & 15).to(tl.int32))
    return number.to(tl.float32) if EXACT else number


@triton.jit
def half(both, chunk: tl.constexpr, kind: tl.constexpr, EXACT: tl.constexpr):
    """The low halves of words, or for odd chunks the high ones: floats of 16 bits, widened to 32 for `EXACT`."""
    shifted = both >> 16 if chunk % 2 == 1 else both
    if EXACT and kind == tl.bfloat16:
        number = (shifted << 16).to(tl.float32, bitcast=True)
    else:
        number = shifted.to(tl.uint16).to(kind, bitcast=True)
        if EXACT:
            number = number.to(tl.float32)
    return number
