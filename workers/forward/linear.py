"""Linear layers as a step wants them: local, laid out once, siblings joined, eight bits where asked for.

A decoding step reads every weight once and computes little with it, so its time is that of the reading.
On CPU the weights are packed for oneDNN when the model is loaded; projections of one input (query, key
and value; gate and up) become one product; under tensor parallelism each rank computes on its own plain
shard, and the only thing between the ranks is the all-reduce after a row-parallel layer.

The products are operators of their own (`pilotfish::linear`, `pilotfish::joined`), opaque to the
compiler: a packed weight is no tensor that it could trace. A layer names its weights by a handle in a
tensor, not by a number, so that one compiled layer serves all layers of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import distributed, nn

from workers.forward.operators import define

_INT8_OPERATOR_ROWS = 48  # with more rows, converting the weights once is cheaper than torch's int8 operator
_INT8_OPERATOR_INPUTS = 16  # in bfloat16, torch's int8 operator reads out of bounds unless 16 divides the inputs
_PACKED_FOR_ROWS = 8  # the layout that oneDNN chooses serves other widths as well


class LinearKernel(Protocol):
    """What multiplies: weights in whatever layout."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        ...


@dataclass(slots=True)
class DenseKernel:
    """Weights as they came."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearKernel`."""
        return nn.functional.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class OneDnnKernel:
    """Weights in oneDNN's own layout."""

    weight: torch.Tensor  # opaque
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearKernel`."""
        # oneDNN keeps code and scratch memory for every width it meets, so it meets few.
        shape = x.shape[:-1]
        rows = shape.numel()
        missing = padded_rows(rows) - rows
        if missing:
            x = nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, missing))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return product[:rows].view(*shape, -1) if missing else product


def padded_rows(rows: int) -> int:
    """The next of few widths: at most a quarter wider, and exact where decoding lives."""
    if rows <= 8:
        return rows
    grain = max(4, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // grain) * grain


@dataclass(slots=True)
class Int8Kernel:
    """Symmetric weights of eight bits with one scale per output; activations stay as they are (weight-only)."""

    weight: torch.Tensor  # [out, in] int8
    scale: torch.Tensor  # [out]
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearKernel`. Both ways compute `(x @ integers) * scale`: eight bits are exact in every float type."""
        flat = x.flatten(0, -2)
        if flat.shape[0] <= _INT8_OPERATOR_ROWS and flat.shape[1] % _INT8_OPERATOR_INPUTS == 0:
            product = torch._weight_int8pack_mm(flat, self.weight, self.scale)
        else:
            product = nn.functional.linear(flat, self.weight.to(x.dtype)) * self.scale
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One product and what follows it."""

    product: LinearKernel
    reduce: bool = False
    bias_after: torch.Tensor | None = None
    """Added once, to the sum of the ranks' shares."""


_entries: dict[int, _Entry] = {}
_handles = count()


class FastLinear(nn.Module):
    """Takes the place of an `nn.Linear`."""

    def __init__(
        self, product: LinearKernel, width: int, reduce: bool = False, bias: torch.Tensor | None = None
    ) -> None:
        """With `reduce`, the ranks' shares are summed before `bias` is added."""
        super().__init__()
        self.out_features = width
        self.register_buffer("handle", _enter(self, _Entry(product, reduce, bias)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        output: torch.Tensor = torch.ops.pilotfish.linear(x, self.handle, self.out_features)
        return output


class _MergedProjection:
    """What siblings compute together: whoever is called first on an input leaves the others their parts."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self.source: torch.Tensor | None = None
        self.parts: list[torch.Tensor | None] = [None] * len(widths)


class MergedLinear(nn.Module):
    """Takes the place of one of several `nn.Linear` that are applied to the same input, each once per pass."""

    def __init__(self, joint: _MergedProjection, part: int, handle: torch.Tensor) -> None:
        super().__init__()
        self.out_features = joint.widths[part]
        self._joint = joint
        self._part = part
        self.register_buffer("handle", handle, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        joint = self._joint
        mine = joint.parts[self._part] if joint.source is x else None
        if mine is None:
            parts = torch.ops.pilotfish.joined(x, self.handle, joint.widths)
            joint.source, joint.parts = x, list(parts)
            mine = parts[self._part]
        joint.parts[self._part] = None
        if all(part is None for part in joint.parts):
            joint.source = None
        return mine


def merge_linears(product: LinearKernel, widths: Sequence[int]) -> tuple[MergedLinear, ...]:
    """Siblings over one product of all their weights, one after another. On different inputs they are right, too."""
    joint = _MergedProjection(widths)
    handle = _enter(joint, _Entry(product))
    return tuple(MergedLinear(joint, part, handle) for part in range(len(widths)))


def make_linear_kernel(
    weight: torch.Tensor, bias: torch.Tensor | None, quantization: str = "none", cut_inputs: bool = False
) -> LinearKernel:
    """The fastest product for these weights `[out, in]` where they are. `cut_inputs`: see `quantize`."""
    if quantization == "int8":
        return Int8Kernel(*quantize(weight, cut_inputs), bias)
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        return OneDnnKernel(packed, bias)
    return DenseKernel(weight, bias)


def quantize(weight: torch.Tensor, cut_inputs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`[out, in]` → integers `[out, in]` and scales `[out]`, so that `integers * scale` is nearest to the weights.

    With `cut_inputs` each rank holds some of the inputs: all ranks take one scale, that of the whole row, so that the
    quantized model does not depend on the number of ranks.
    """
    largest = weight.float().abs().amax(dim=1)
    if cut_inputs:
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    # Counted in the scale as it is kept, which is rounded to the weights' own type.
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
    """A handle for as long as `owner` lives."""
    handle = next(_handles)
    _entries[handle] = entry
    weakref.finalize(owner, _entries.pop, handle, None)
    return torch.tensor(handle)


def _linear(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001 - for the compiler
    entry = _entries[int(handle)]
    output = entry.product.multiply(x)
    if entry.reduce:
        distributed.all_reduce(output)
    return output if entry.bias_after is None else output + entry.bias_after


def _linear_shape(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], width))


def _joined(x: torch.Tensor, handle: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    product = _entries[int(handle)].product.multiply(x)
    # Copies, since the compiler takes results of an operator for memory of their own.
    return [part.clone(memory_format=torch.contiguous_format) for part in torch.split(product, widths, dim=-1)]


def _joined_shape(x: torch.Tensor, handle: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:  # noqa: ARG001
    return [x.new_empty((*x.shape[:-1], width)) for width in widths]


define("linear(Tensor x, Tensor handle, int width) -> Tensor", _linear, _linear_shape)
define("joined(Tensor x, Tensor handle, int[] widths) -> Tensor[]", _joined, _joined_shape)
