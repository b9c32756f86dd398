"""A product with packed weights, for the small matrices of drafting modules. See decoder.c.

A drafting module multiplies few rows with small matrices, so calls cost as much as arithmetic. The kernel takes
float32 rows, rounds them as it needs, and returns float32 rows, in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad, rms_norm

from workers.forward.linear import Int8Kernel, quantize
from workers.forward.native.attention import KINDS
from workers.forward.native.build import load_library
from workers.forward.native.structures import Matrix
from workers.kv.huge_pages import Arena

INT8_TILES = 3
"""The kind of int8 weights in the order of tile registers and VNNI; see products.h."""


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


class PackedLinear:
    """Weights `[out, in]` of one dtype, packed for the CPU kernels, and an optional bias `[out]`. Not thread-safe.

    `dtype` is float32, bfloat16 or int8 (symmetric, one scale per output). In bfloat16 the rows are rounded to bfloat16
    before the product, if the processor multiplies bfloat16. Without a compiler, or with an odd number of inputs in
    bfloat16, torch multiplies. `directory` keeps the compiled kernels between starts. Raises `ValueError` for another
    dtype or a weight that is not on CPU.
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
        if dtype not in KINDS or weight.device.type != "cpu":
            raise ValueError(f"weights of {dtype} on {weight.device} are refused; only {[*KINDS]} on CPU are packed")
        self.outputs, self.inputs = weight.shape
        self._bias = None if bias is None else bias.detach().float()
        self._library = None if dtype is torch.bfloat16 and self.inputs % 2 else load_library(directory)
        self._norm = norm
        if self._library is None:
            self._weight, self._scale = stored_as(weight if norm is None else norm.folded(weight), dtype)
        else:
            self._bind(weight, dtype, self._library)

    def _bind(self, weight: torch.Tensor, dtype: torch.dtype, library: ctypes.CDLL) -> None:
        self._packed = pack_matrix(weight, dtype, library, self._bias)
        self._address = ctypes.addressof(self._packed.matrix)
        self._input = torch.empty(0)
        """What is multiplied: the rows after the norm and rounding."""
        self._norm_address: int | None = None
        if self._norm is not None:
            norm = self._norm
            self._norm_weight = norm.weight.detach().float().clone()
            self._structure = _InputNorm(norm.plain, norm.group, norm.epsilon, self._norm_weight.data_ptr())
            self._norm_address = ctypes.addressof(self._structure)
        self._multiply = linear_function(library)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` float32 `[rows, in]` → float32 `[rows, out]`. Raises `ValueError` for another shape or dtype."""
        if x.dim() != 2 or x.shape[1] != self.inputs or x.dtype is not torch.float32:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} is refused; it must be float32 [rows, {self.inputs}]")
        if not len(x):
            return x.new_empty((0, self.outputs))
        if self._library is None:
            return self._multiply_with_torch(x)
        x = x.contiguous()
        rows = len(x)
        product = torch.empty((rows, self.outputs))
        if self._input.numel() < x.numel():
            self._input = torch.empty(x.numel())
        addresses = (x.data_ptr(), self._input.data_ptr(), product.data_ptr())
        self._multiply(self._address, self._norm_address, *addresses, rows)
        return product

    def _multiply_with_torch(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self._norm is None else self._norm.scaled(x)
        if self._scale is not None:
            return Int8Kernel(self._weight, self._scale, self._bias).multiply(x)
        product = linear(x.to(self._weight.dtype), self._weight).float()
        return product if self._bias is None else product + self._bias


def linear_function(library: ctypes.CDLL) -> Callable[..., None]:
    """The C function `pilotfish_linear`: addresses of matrix, norm or `None`, rows, buffer and product, then the rows.

    The buffer holds the rows after the norm, float32, or rounded to bfloat16 for weights of that type.
    """
    function = library.pilotfish_linear
    function.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64]
    function.restype = None
    return function


class PackedMatrix:
    """The C structure of a matrix, and the tensors that it points to. All are float32 but the weight."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        columns: int,
        arena: Arena | None = None,
        *,
        on_tiles: bool = False,
    ) -> None:
        """`weight` `[out, in]` as `stored_as` returns it. `scale` and `bias` are `[out]`, or none.

        The packed weight lies in `arena`, if there is one. `on_tiles`: see `pack_matrix`.
        """
        outputs, inputs = weight.shape
        self.weight = pack_blocks(weight, columns, arena, on_tiles=on_tiles)
        self._vectors = [None if values is None else pad_rows(values, columns).clone() for values in (scale, bias)]
        self.matrix = Matrix(
            *(INT8_TILES if on_tiles else KINDS[weight.dtype], inputs, outputs, len(self.weight)),
            *(self.weight.data_ptr(), *(None if values is None else values.data_ptr() for values in self._vectors)),
        )


def has_int8_tiles(directory: str | None) -> bool:
    """Whether int8 weights are multiplied as integers (AMX, VNNI): few rows then take half the time of bfloat16."""
    library = load_library(directory)
    return library is not None and is_on_tiles(library, torch.int8, 64)


def pack_matrix(
    weight: torch.Tensor, dtype: torch.dtype, library: ctypes.CDLL, bias: torch.Tensor | None = None
) -> PackedMatrix:
    """Weights `[out, in]` in this dtype. int8 weights are multiplied as integers where AMX or VNNI can."""
    on_tiles = is_on_tiles(library, dtype, weight.shape[1])
    return PackedMatrix(*stored_as(weight, dtype), bias, block_columns(library), on_tiles=on_tiles)


def is_on_tiles(library: ctypes.CDLL, dtype: torch.dtype, inputs: int) -> bool:
    """Whether weights `[out, inputs]` of this dtype are packed for integer products, in the order of tile registers."""
    return dtype is torch.int8 and bool(library.pilotfish_splits_rows(ctypes.c_int64(inputs)))


def stored_as(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight `[out, in]` in this dtype, and for int8 its scales, float32 `[out]`."""
    return quantize(weight.detach().float()) if dtype is torch.int8 else (weight.detach().to(dtype), None)


def interleave(gates: torch.Tensor, ups: torch.Tensor, columns: int) -> torch.Tensor:
    """Interleave the rows: each block has a vector of gates, then its vector of ups. Returns `[2 * padded, …]`."""
    lanes = columns // 2
    pairs = [pad_rows(part, lanes).view(-1, lanes, *part.shape[1:]) for part in (gates.detach(), ups.detach())]
    return torch.stack(pairs, dim=1).flatten(0, 2)


def block_columns(library: ctypes.CDLL) -> int:
    """Outputs per block of a packed matrix: two vector registers of this processor."""
    library.pilotfish_columns.restype = ctypes.c_int64
    return int(library.pilotfish_columns())


def pad_rows(values: torch.Tensor, grain: int) -> torch.Tensor:
    """Pad `[out, …]` with zeros to a multiple of `grain` rows."""
    missing = -len(values) % grain
    widths: Sequence[int] = (*(0, 0) * (values.dim() - 1), 0, missing)
    return pad(values, widths) if missing else values


def pack_blocks(
    weight: torch.Tensor, columns: int, arena: Arena | None = None, *, on_tiles: bool = False
) -> torch.Tensor:
    """`[out, in]` → `[blocks, in, columns]`, as the kernels read.

    For bfloat16 it is `[blocks, in / 2, columns, 2]`, for int8 `on_tiles` `[blocks, in / 4, columns, 4]`.

    The result lies in `arena`, if there is one. Missing outputs of the last block are zeros.
    """
    outputs, inputs = weight.shape
    grain = 4 if on_tiles else 2 if weight.dtype is torch.bfloat16 else 1
    shape = (-(-outputs // columns), inputs // grain, columns, *([grain] if grain > 1 else []))
    packed = torch.empty(shape, dtype=weight.dtype) if arena is None else arena.take(shape, weight.dtype)
    whole = outputs // columns
    _transpose_blocks(weight[: whole * columns], packed[:whole])
    if outputs % columns:
        _transpose_blocks(pad_rows(weight[whole * columns :], columns), packed[whole:])
    return packed


def _transpose_blocks(weight: torch.Tensor, packed: torch.Tensor) -> None:
    """Fill whole blocks. Two bfloat16 numbers, or four int8 numbers, are copied as one of 32 bits, in less time."""
    if packed.dim() == 4:
        weight = weight.clone() if weight.storage_offset() % packed.shape[3] else weight.contiguous()
        weight, packed = weight.view(torch.int32), packed.view(torch.int32).squeeze(-1)
    packed.copy_(weight.reshape(len(packed), packed.shape[2], packed.shape[1]).transpose(1, 2))
