"""A product with packed weights, for the small matrices of drafting modules. See decoder.c.

A drafting module multiplies few rows with small matrices, so calls cost as much as arithmetic. The kernel takes
float32 rows, rounds them as it needs, and returns float32 rows, in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, rms_norm

from workers.forward.native.build import load_library
from workers.forward.native.structures import Matrix
from workers.forward.weights.base import Grouping, KernelLayout, Kind, Storage, Take, pad_rows, taken_rows
from workers.forward.weights.choice import STORED_TYPES, stored_as
from workers.kv.huge_pages import Arena


@dataclass(frozen=True, slots=True, eq=False)
class InputNorm:
    """RMS norms of a product's inputs: each group of neighbours is normalised by itself."""

    weight: torch.Tensor
    """[inputs - plain], a whole number of groups."""
    epsilon: float
    group: int
    """Inputs of a group."""
    plain: int = 0
    """Number of first inputs that are not normalised."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[rows, inputs]` normalised without the weights; the first `plain` inputs stay as they are."""
        groups = x[:, self.plain :].reshape(len(x), -1, self.group)
        return torch.cat([x[:, : self.plain], rms_norm(groups, (self.group,), None, self.epsilon).flatten(1)], dim=1)

    def folded(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` `[out, in]` times the norm's weights, float32, for a product of inputs from `scaled`."""
        return weight.detach().float() * pad(self.weight.detach().float(), (self.plain, 0), value=1.0)


class _InputNorm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("plain", "group")),
        ("epsilon", ctypes.c_float),
        ("weight", ctypes.c_void_p),
    ]


class PackedProduct:
    """A stored matrix, packed for the CPU kernels, and an optional bias `[out]`. Not thread-safe."""

    def __init__(
        self,
        storage: Storage,
        library: ctypes.CDLL,
        bias: torch.Tensor | None = None,
        norm: InputNorm | None = None,
        *,
        layout: KernelLayout | None = None,
    ) -> None:
        """`norm`, if there is one, is applied to the rows first. `layout` replaces that of `library`."""
        self.outputs, self.inputs = storage.outputs, storage.inputs
        self.matrix = PackedMatrix(storage, bias, kernel_layout(library) if layout is None else layout)
        self._address = ctypes.addressof(self.matrix.matrix)
        self._input = torch.empty(0)
        """What is multiplied: the rows after the norm and rounding."""
        self._norm_address: int | None = None
        if norm is not None:
            self._norm_weight = norm.weight.detach().float().clone()
            self._structure = _InputNorm(norm.plain, norm.group, norm.epsilon, self._norm_weight.data_ptr())
            self._norm_address = ctypes.addressof(self._structure)
        self._multiply = linear_function(library)
        self._multiply_bfloat16 = c_function(library.pilotfish_linear_bfloat16, 3, 1)
        is_rounded = self.matrix.matrix.kind == Kind.BFLOAT16 and bool(library.pilotfish_has_bfloat16_products())
        self._read_rows = c_function(library.pilotfish_rows, 3, 1)
        self.has_rows = has_rows(storage)
        """Whether `rows` can be called."""
        self._has_input = is_rounded or norm is not None
        self.takes_bfloat16 = is_rounded and norm is None
        """Whether `multiply_bfloat16` can be called."""

    def multiply_bfloat16(self, x: torch.Tensor) -> torch.Tensor:
        """`x` bfloat16 `[rows, in]` → bfloat16 `[rows, out]`, without a copy of either in float32.

        Raises `ValueError` for another shape or dtype, or if the processor or the weights have other products.
        """
        if not self.takes_bfloat16 or x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} is refused; it must be bfloat16 [rows, {self.inputs}]")
        product = torch.empty((len(x), self.outputs), dtype=torch.bfloat16)
        if len(x):
            x = x.contiguous()
            self._multiply_bfloat16(self._address, x.data_ptr(), product.data_ptr(), len(x))
        return product

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Outputs `ids`, int64 `[rows]`, of the matrix → float32 `[rows, in]`, to the bits of `Storage.dequantized`.

        Raises `IndexError` for an output that the matrix does not have.
        """
        ids = ids.to(torch.int64).contiguous()
        found = torch.empty((len(ids), self.inputs))
        if len(ids):
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= self.outputs:
                raise IndexError(f"rows {low} to {high}: the matrix has {self.outputs}")
            self._read_rows(self._address, ids.data_ptr(), found.data_ptr(), len(ids))
        return found

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` float32 `[rows, in]` → float32 `[rows, out]`. Raises `ValueError` for another shape or dtype."""
        check_rows(x, self.inputs)
        if not len(x):
            return x.new_empty((0, self.outputs))
        x = x.contiguous()
        product = torch.empty((len(x), self.outputs))
        if self._has_input and self._input.numel() < x.numel():
            self._input = torch.empty(x.numel())
        addresses = (x.data_ptr(), self._input.data_ptr(), product.data_ptr())
        self._multiply(self._address, self._norm_address, *addresses, len(x))
        return product


class PackedLinear:
    """Weights `[out, in]` of one dtype, packed for the CPU kernels, and an optional bias `[out]`. Not thread-safe.

    `dtype` is float32, bfloat16, int8 (symmetric, one scale per output) or `INT4` (4 bits, with a scale and a minimum
    for each group of inputs). In bfloat16 the rows are rounded to bfloat16 before the product, if the processor
    multiplies bfloat16. Without a compiler, or with an odd number of inputs in bfloat16, torch multiplies. `directory`
    keeps the compiled kernels between starts. Raises `ValueError` for another dtype or a weight that is not on CPU.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        bias: torch.Tensor | None = None,
        directory: str | None = None,
        norm: InputNorm | None = None,
    ) -> None:
        """`norm`, if there is one, is applied to the rows first."""
        if dtype not in STORED_TYPES or weight.device.type != "cpu":
            raise ValueError(
                f"weights of {dtype} on {weight.device} are refused; only {[*STORED_TYPES]} on CPU are packed"
            )
        self.outputs, self.inputs = weight.shape
        self._norm = norm
        self._dtype = dtype if dtype.is_floating_point else torch.float32
        self._bias = None if bias is None else bias.detach().float()
        library = None if dtype is torch.bfloat16 and self.inputs % 2 else load_library(directory)
        self._packed = None
        if library is None:
            self._kernel = stored_as(weight if norm is None else norm.folded(weight), dtype).kernel(None)
        else:
            self._packed = PackedProduct(stored_as(weight, dtype), library, self._bias, norm)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` float32 `[rows, in]` → float32 `[rows, out]`. Raises `ValueError` for another shape or dtype."""
        if self._packed is not None:
            return self._packed.multiply(x)
        check_rows(x, self.inputs)
        if not len(x):
            return x.new_empty((0, self.outputs))
        product = self._kernel.multiply((x if self._norm is None else self._norm.scaled(x)).to(self._dtype)).float()
        return product if self._bias is None else product + self._bias


def check_rows(x: torch.Tensor, inputs: int) -> None:
    """Raise `ValueError` unless `x` is float32 `[rows, inputs]`."""
    if x.dim() != 2 or x.shape[1] != inputs or x.dtype is not torch.float32:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} is refused; it must be float32 [rows, {inputs}]")


def linear_function(library: ctypes.CDLL) -> Callable[..., None]:
    """The C function `pilotfish_linear`: addresses of matrix, norm or `None`, rows, buffer and product, then the rows.

    The buffer holds the rows after the norm, float32, or rounded to bfloat16 for weights of that type.
    """
    return c_function(library.pilotfish_linear, 5, 1)


def c_function(function: Callable[..., None], pointers: int, numbers: int) -> Callable[..., None]:
    """A function of the kernels that takes so many addresses, then so many numbers, and returns nothing."""
    function.argtypes = [*[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * numbers]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


class PackedMatrix:
    """The C structure of a stored matrix, and the tensors that it points to."""

    def __init__(
        self, storage: Storage, bias: torch.Tensor | None, layout: KernelLayout, arena: Arena | None = None
    ) -> None:
        """`bias` is `[out]`, or none. The packed weight lies in `arena`, if there is one."""
        take: Take = _new_tensor if arena is None else arena.take
        blocks = storage.blocks(layout, take)
        self.weight = blocks.weight
        own_bias = None if bias is None else pad_rows(bias.detach().float(), layout.columns).clone()
        self.vectors = [values for values in (blocks.scale, own_bias) if values is not None]
        """What the structure points to beside the weight."""
        self.matrix = Matrix(
            *(blocks.kind, storage.inputs, storage.outputs, len(blocks.weight), blocks.weight.data_ptr()),
            *(None if values is None else values.data_ptr() for values in (blocks.scale, own_bias)),
        )
        if blocks.grouping is not None:
            self._set_groups(blocks.grouping)

    def _set_groups(self, grouping: Grouping) -> None:
        matrix, order, table = self.matrix, grouping.order, grouping.table
        matrix.group, matrix.scale_kind = grouping.group, grouping.scale_kind
        matrix.offset, matrix.zero = grouping.offset, grouping.zero
        matrix.super, matrix.planes, matrix.less = grouping.super_groups, grouping.planes, grouping.less
        if order is not None:
            self.vectors.append(order)
            matrix.order = order.data_ptr()
        if table is not None:
            self.vectors.append(table)
            matrix.table = table.data_ptr()


def _new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def kernel_layout(library: ctypes.CDLL) -> KernelLayout:
    """How this processor's kernels read packed matrices."""
    library.pilotfish_columns.restype = ctypes.c_int64

    def multiplies_integers(inputs: int) -> bool:
        return bool(library.pilotfish_splits_rows(ctypes.c_int64(inputs)))

    def multiplies_groups(group: int) -> bool:
        return bool(library.pilotfish_splits_groups(ctypes.c_int64(group)))

    return KernelLayout(int(library.pilotfish_columns()), multiplies_integers, multiplies_groups)


def float_layout(library: ctypes.CDLL) -> KernelLayout:
    """`kernel_layout` for products of activations as they are: integers of them would round them in float32."""
    return KernelLayout(kernel_layout(library).columns, lambda _: False, lambda _: False)


def can_pack(storage: Storage) -> bool:
    """Whether the CPU kernels take this matrix as it is stored."""
    if storage.device.type != "cpu" or storage.plain is None:
        return storage.device.type == "cpu" and storage.is_widened
    dtype = storage.plain.dtype
    return dtype is torch.float32 or (dtype is torch.bfloat16 and storage.inputs % 2 == 0)


def has_rows(storage: Storage) -> bool:
    """Whether the CPU kernels read single rows of this matrix once it is packed, to the bits of `dequantized`."""
    return can_pack(storage) and storage.has_packed_rows


def has_int8_tiles(directory: str | None) -> bool:
    """Whether int8 weights are multiplied as integers (AMX, VNNI): few rows then take half the time of bfloat16."""
    library = load_library(directory)
    return library is not None and kernel_layout(library).multiplies_integers(64)


def gate_up(gate: Storage, up: Storage, columns: int) -> Storage:
    """The outputs of both in one matrix: each block has a vector of gates, then the ups that belong to them."""
    return gate.joined([up]).take_outputs(gate_up_order(gate.outputs, columns))


def gate_up_bias(gate: torch.Tensor, up: torch.Tensor, columns: int) -> torch.Tensor:
    """The biases of `gate_up`."""
    return taken_rows(torch.cat([gate, up]).detach(), gate_up_order(len(gate), columns))


def gate_up_order(inner: int, columns: int) -> torch.Tensor:
    """Where the outputs of `gate_up` are among `inner` gates and the ups after them; −1 for those that are missing."""
    lanes = columns // 2
    gates = torch.arange(-(-inner // lanes) * lanes)
    gates[inner:] = -1
    ups = torch.where(gates < 0, gates, gates + inner)
    return torch.stack([gates.view(-1, lanes), ups.view(-1, lanes)], dim=1).flatten()
