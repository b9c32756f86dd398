"""Linear layers for decoding: local weights, packed once, merged projections, optional int8 weights.

A decoding step reads every weight once and computes little with it, so memory bandwidth bounds it. On CPU the weights
are packed for oneDNN when the model is loaded. Projections of the same input (query, key and value; gate and up)
become one product. Under tensor parallelism each rank multiplies with its own shard, and the ranks communicate only
in the all-reduce after a row-parallel layer.

On CPU a row's product has the same bits whichever rows are multiplied beside it. Libraries choose code by the number of
rows, and other code adds in another order. So rows are multiplied in tiles of a fixed number of rows, and in smaller
ones only where a trial shows the same bits.

The products are custom operators (`pilotfish::linear`, `pilotfish::joined`), because the compiler cannot trace a
packed weight. A layer identifies its weights by a handle in a tensor instead of a number, so that one compiled layer
serves all layers of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import distributed, nn

from workers.forward.operators import define

_INT8_OPERATOR_INPUTS = 16  # torch's int8 operator reads out of bounds unless 16 divides the inputs
_INT8_SLICE_OUTPUTS = 256  # int8 weights are converted for so many outputs at a time, which the caches hold
_TILE_ROWS = 64
_ALIGNMENT = 64  # bytes; other alignments of its input can make a library add in another order
_PACKED_FOR_ROWS = 8  # oneDNN's layout for this width serves the others as well


class LinearKernel(Protocol):
    """Weights in some layout, and the multiplication with them."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        ...


@dataclass(slots=True)
class DenseKernel:
    """Weights in torch's own layout."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. On CPU no row's product depends on the other rows."""
        return self.product(x) if self.weight.device.type != "cpu" else _in_tiles(x, self)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply all rows at once."""
        return nn.functional.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class OneDnnKernel:
    """Weights in oneDNN's own layout."""

    weight: torch.Tensor  # opaque
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. No row's product depends on the other rows."""
        return _in_tiles(x, self)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply all rows at once."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return product


_exact_widths: dict[tuple[object, ...], tuple[int, ...]] = {}
"""What `exact_widths` found, by all that a library may choose its code by."""


def _in_tiles(x: torch.Tensor, kernel: DenseKernel | OneDnnKernel) -> torch.Tensor:
    """Multiply `x` `[…, in]` → `[…, out]`, only with numbers of rows at which the kernel gives the same bits."""
    weight = kernel.weight
    strides = weight.stride() if weight.layout is torch.strided else None
    key = (weight.layout, weight.shape, strides, weight.dtype, kernel.bias is None, torch.get_num_threads())
    widths = _exact_widths.get(key)
    if widths is None:
        widths = _exact_widths[key] = exact_widths(kernel.product, weight.shape[1], weight.dtype)
    flat = x.reshape(-1, x.shape[-1])
    parts = [_padded_product(rows, kernel.product, widths) for rows in torch.split(flat, widths[-1])]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], -1)


def _padded_product(
    rows: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], widths: Sequence[int]
) -> torch.Tensor:
    """The product of at most `widths[-1]` rows, with rows of zeros up to the next width."""
    missing = next(width for width in widths if width >= len(rows)) - len(rows)
    if missing:
        return product(nn.functional.pad(rows, (0, 0, 0, missing)))[: len(rows)]
    return product(rows.contiguous() if rows.data_ptr() % _ALIGNMENT == 0 else rows.clone())


def exact_widths(product: Callable[[torch.Tensor], torch.Tensor], inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Find the numbers of rows, ascending, at which `product` gives each row the same bits, by a trial on random rows.

    They are those widths of `padded_rows` that agree with the widest tile. If the tile's own rows depend on where they
    stand in it, rows are multiplied one at a time.
    """
    tile = torch.randn(_TILE_ROWS, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, shift = product(tile), _TILE_ROWS // 5
    if not torch.equal(product(tile.roll(shift, 0)).roll(-shift, 0), whole):
        return (1,)
    widths = sorted({padded_rows(rows) for rows in range(1, _TILE_ROWS)} - {_TILE_ROWS})
    firsts = [width % (_TILE_ROWS - width) for width in widths]
    agree = [
        torch.equal(product(tile[first : first + width].clone()), whole[first : first + width])
        for first, width in zip(firsts, widths, strict=True)
    ]
    return (*(width for width, equal in zip(widths, agree, strict=True) if equal), _TILE_ROWS)


def padded_rows(rows: int) -> int:
    """Round up to one of few widths: exact up to 8, and at most a quarter wider beyond."""
    if rows <= 8:
        return rows
    grain = max(4, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // grain) * grain


@dataclass(slots=True)
class Int8Kernel:
    """Symmetric int8 weights with one scale per output. Activations are not quantized."""

    weight: torch.Tensor  # [out, in] int8
    scale: torch.Tensor  # [out]
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`: `(x @ integers) * scale`. No row's product depends on the other rows.

        The code is chosen by the type and the number of inputs alone. int8 values are exact in every floating type.
        """
        flat = x.flatten(0, -2)
        if x.dtype is torch.bfloat16 and flat.shape[1] % _INT8_OPERATOR_INPUTS == 0:
            product = torch._weight_int8pack_mm(flat, self.weight, self.scale)
        else:  # in float32 torch's operator is not vectorized
            slices = torch.split(self.weight, _INT8_SLICE_OUTPUTS)
            product = torch.cat([DenseKernel(part.to(x.dtype), None).multiply(flat) for part in slices], dim=-1)
            product = product * self.scale
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A kernel, and the operations after its product."""

    kernel: LinearKernel
    reduce: bool = False
    bias_after: torch.Tensor | None = None
    """Added after the all-reduce."""


_entries: dict[int, _Entry] = {}
_handles = count()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Stands for the weights of a replaced layer, for code of its parent that asks for their type."""

    dtype: torch.dtype
    shape: torch.Size
    """[out, in]."""


class FastLinear(nn.Module):
    """Replaces an `nn.Linear`."""

    weight: PackedWeight | None = None
    """The weights are packed. T5's feed-forward network asks for their dtype and accepts what is no tensor."""

    def __init__(
        self, kernel: LinearKernel, width: int, reduce: bool = False, bias: torch.Tensor | None = None
    ) -> None:
        """`reduce` sums the outputs of all ranks before `bias` is added."""
        super().__init__()
        self.out_features = width
        self.register_buffer("handle", _enter(self, _Entry(kernel, reduce, bias)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        output: torch.Tensor = torch.ops.pilotfish.linear(x, self.handle, self.out_features)
        return output


class _MergedProjection:
    """The product of merged projections: the first to be called on an input stores the parts of the others."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self.source: torch.Tensor | None = None
        self.parts: list[torch.Tensor | None] = [None] * len(widths)


class MergedLinear(nn.Module):
    """Replaces one of several `nn.Linear` layers that are applied to the same input."""

    weight = None
    """The parts are packed. Code that asks for the dtype of the weights accepts `None`."""

    def __init__(self, merged: _MergedProjection, part: int, handle: torch.Tensor) -> None:
        super().__init__()
        self.out_features = merged.widths[part]
        self._merged = merged
        self._part = part
        self.register_buffer("handle", handle, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        merged = self._merged
        own = merged.parts[self._part] if merged.source is x else None
        if own is None:
            parts = self._parts(x)
            merged.source, merged.parts = x, list(parts)
            own = parts[self._part]
        merged.parts[self._part] = None
        if all(part is None for part in merged.parts):
            merged.source = None
        return own

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """All parts. On a GPU they are views of the product, which saves a launch and a copy for each."""
        widths = self._merged.widths
        if x.device.type == "cpu":
            parts: list[torch.Tensor] = torch.ops.pilotfish.joined(x, self.handle, widths)
            return parts
        whole: torch.Tensor = torch.ops.pilotfish.linear(x, self.handle, sum(widths))
        return torch.split(whole, widths, dim=-1)


def merge_linears(kernel: LinearKernel, widths: Sequence[int]) -> tuple[MergedLinear, ...]:
    """Layers that share one product. `kernel` holds their weights, one after another, with these output widths.

    They stay correct if they are called on different inputs.
    """
    merged = _MergedProjection(widths)
    handle = _enter(merged, _Entry(kernel))
    return tuple(MergedLinear(merged, part, handle) for part in range(len(widths)))


def make_linear_kernel(
    weight: torch.Tensor, bias: torch.Tensor | None, quantization: str = "none", cut_inputs: bool = False
) -> LinearKernel:
    """The fastest kernel for weights `[out, in]` on their device. `cut_inputs`: see `quantize`."""
    if quantization == "int8":
        return Int8Kernel(*quantize(weight, cut_inputs), bias)
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        return OneDnnKernel(packed, bias)
    return DenseKernel(weight, bias)


def quantize(weight: torch.Tensor, cut_inputs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights `[out, in]` to int8 `[out, in]` and scales `[out]`, rounding to the nearest.

    With `cut_inputs` each rank holds some of the inputs. All ranks then use the scale of the whole row, so that the
    quantized weights do not depend on the number of ranks.
    """
    largest = weight.float().abs().amax(dim=1)
    if cut_inputs:
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    # The integers are computed with the scale as it is stored, rounded to the type of the weights.
    scale = (largest / 127.0).to(weight.dtype)
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    integers = (weight.float() / step[:, None]).round().clamp(-127, 127).to(torch.int8)
    return integers, scale


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def _enter(owner: object, entry: _Entry) -> torch.Tensor:
    """Register an entry for the lifetime of `owner`. Returns its handle."""
    handle = next(_handles)
    _entries[handle] = entry
    weakref.finalize(owner, _entries.pop, handle, None)
    return torch.tensor(handle)


def _linear(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001 - for the compiler
    entry = _entries[int(handle)]
    output = entry.kernel.multiply(x)
    if entry.reduce:
        distributed.all_reduce(output)
    return output if entry.bias_after is None else output + entry.bias_after


def _linear_shape(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], width))


def _joined(x: torch.Tensor, handle: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    product = _entries[int(handle)].kernel.multiply(x)
    # Copies, since the compiler assumes that the results of an operator do not share memory.
    return [part.clone(memory_format=torch.contiguous_format) for part in torch.split(product, widths, dim=-1)]


def _joined_shape(x: torch.Tensor, handle: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:  # noqa: ARG001
    return [x.new_empty((*x.shape[:-1], width)) for width in widths]


define("linear(Tensor x, Tensor handle, int width) -> Tensor", _linear, _linear_shape)
define("joined(Tensor x, Tensor handle, int[] widths) -> Tensor[]", _joined, _joined_shape)
