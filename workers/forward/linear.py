"""Linear layers for decoding: local weights, packed once, merged projections, in any storage.

A decoding step reads every weight once and computes little with it, so memory bandwidth bounds it. On CPU the weights
are packed for the CPU kernels, or for oneDNN, when the model is loaded. Projections of the same input (query, key and
value; gate and up) become one product. Under tensor parallelism each rank multiplies with its own shard, and the ranks
communicate only in the all-reduce after a row-parallel layer.

The products are custom operators (`pilotfish::linear`, `pilotfish::joined`), because the compiler cannot trace a
packed weight. A layer identifies its weights by a handle in a tensor instead of a number, so that one compiled layer
serves all layers of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from workers.forward.gpu_product import gpu_product
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedProduct, can_pack, float_layout
from workers.forward.operators import Entries, define
from workers.forward.weights.base import LinearKernel, Storage
from workers.forward.weights.plain import DenseKernel
from workers.ranks import sum_over_ranks


@dataclass(frozen=True, slots=True, eq=False)
class PackedKernel:
    """Weights in the layout of Pilotfish's CPU kernels, which read them as they are stored and add in float32."""

    packed: PackedProduct

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. No row's product depends on the other rows."""
        rows, packed = x.reshape(-1, x.shape[-1]), self.packed
        if x.dtype is torch.bfloat16 and packed.takes_bfloat16:
            product = packed.multiply_bfloat16(rows)
        else:
            product = packed.multiply(rows.float()).to(x.dtype)
        return product.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A kernel, and the operations after its product."""

    kernel: LinearKernel
    reduce: bool = False
    bias_after: torch.Tensor | None = None
    """Added after the all-reduce."""


_entries: Entries[_Entry] = Entries()


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
        self.register_buffer("handle", _entries.enter(self, _Entry(kernel, reduce, bias)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`."""
        output: torch.Tensor = torch.ops.pilotfish.linear(x, self.handle, self.out_features)
        return output


@dataclass(frozen=True, slots=True, eq=False)
class LocalProduct:
    """What a `FastLinear` computes on this rank, and what follows it."""

    kernel: LinearKernel
    reduce: bool
    """Whether the outputs of all ranks are summed."""
    bias_after: torch.Tensor | None
    """Added after the sum."""

    @property
    def plain(self) -> DenseKernel | None:
        """The plain weights in torch's own layout, if they are."""
        return self.kernel if isinstance(self.kernel, DenseKernel) else None


def local_product(layer: nn.Module) -> LocalProduct | None:
    """What a `FastLinear` computes; `None` for other layers."""
    if not isinstance(layer, FastLinear):
        return None
    entry = _entries[int(cast("torch.Tensor", layer.handle))]
    return LocalProduct(entry.kernel, entry.reduce, entry.bias_after)


def sum_outputs(layer: FastLinear) -> None:
    """Have the outputs of all ranks summed, as those of a layer whose inputs are divided among them."""
    handle = int(cast("torch.Tensor", layer.handle))
    _entries[handle] = replace(_entries[handle], reduce=True)


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
    handle = _entries.enter(merged, _Entry(kernel))
    return tuple(MergedLinear(merged, part, handle) for part in range(len(widths)))


def make_linear_kernel(
    storage: Storage, bias: torch.Tensor | None, directory: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> LinearKernel:
    """The fastest kernel for a stored matrix on its device. `directory` keeps the compiled CPU kernels.

    Without a directory torch multiplies plain numbers: each process would build the kernels for itself. `dtype` is the
    type of the inputs. Raises `NoGpuProduct` for a matrix that a GPU would widen in memory.
    """
    return storage.kernel_of(lambda own: _fastest_kernel(own, bias, directory, dtype))


def _fastest_kernel(
    storage: Storage, bias: torch.Tensor | None, directory: str | None, dtype: torch.dtype
) -> LinearKernel:
    if storage.is_widened and storage.device.type != "cpu":
        return gpu_product(storage, bias, dtype)
    takes = can_pack(storage) and (storage.is_widened or directory is not None)
    library = load_library(directory) if takes else None
    if library is None:
        return storage.kernel(bias)
    # A model's whole pass in the kernels may round activations to integers.
    return PackedKernel(PackedProduct(storage, library, bias, layout=float_layout(library)))


def _linear(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001 - for the compiler
    entry = _entries[int(handle)]
    output = entry.kernel.multiply(x)
    if entry.reduce:
        sum_over_ranks(output)
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
