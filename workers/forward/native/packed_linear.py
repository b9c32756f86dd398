"""A product with packed weights, for the small matrices of drafting modules. See decoder.c.

A drafting module multiplies few rows with small matrices, so calls cost as much as arithmetic. The kernel takes
float32 rows, rounds them as it needs, and returns float32 rows, in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.nn.functional import linear, pad

from workers.forward.linear import Int8Kernel, quantize
from workers.forward.native.attention import KINDS
from workers.forward.native.build import load_library
from workers.forward.native.structures import Matrix
from workers.kv.huge_pages import Arena


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
    ) -> None:
        if dtype not in KINDS or weight.device.type != "cpu":
            raise ValueError(f"weights of {dtype} on {weight.device} are refused; only {[*KINDS]} on CPU are packed")
        self.outputs, self.inputs = weight.shape
        self._weight, self._scale = stored_as(weight, dtype)
        self._bias = None if bias is None else bias.detach().float()
        self._library = None if dtype is torch.bfloat16 and self.inputs % 2 else load_library(directory)
        if self._library is not None:
            self._bind(self._library)

    def _bind(self, library: ctypes.CDLL) -> None:
        self._packed = PackedMatrix(self._weight, self._scale, self._bias, block_columns(library))
        self._weight = self._packed.weight
        self._address = ctypes.addressof(self._packed.matrix)
        self._narrow = torch.empty(self.inputs, dtype=torch.bfloat16)
        self._multiply = library.pilotfish_linear
        self._multiply.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64]
        self._multiply.restype = None

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
        if self._narrow.numel() < x.numel():
            self._narrow = torch.empty(x.numel(), dtype=torch.bfloat16)
        self._multiply(self._address, x.data_ptr(), self._narrow.data_ptr(), product.data_ptr(), rows)
        return product

    def _multiply_with_torch(self, x: torch.Tensor) -> torch.Tensor:
        if self._scale is not None:
            return Int8Kernel(self._weight, self._scale, self._bias).multiply(x)
        product = linear(x.to(self._weight.dtype), self._weight).float()
        return product if self._bias is None else product + self._bias


class PackedMatrix:
    """The C structure of a matrix, and the tensors that it points to. All are float32 but the weight."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        columns: int,
        arena: Arena | None = None,
    ) -> None:
        """`weight` `[out, in]` as `stored_as` returns it. `scale` and `bias` are `[out]`, or none.

        The packed weight lies in `arena`, if there is one.
        """
        outputs, inputs = weight.shape
        self.weight = pack_blocks(weight, columns, arena)
        self._vectors = [None if values is None else pad_rows(values, columns).clone() for values in (scale, bias)]
        self.matrix = Matrix(
            *(KINDS[weight.dtype], inputs, outputs, len(self.weight), self.weight.data_ptr()),
            *(None if values is None else values.data_ptr() for values in self._vectors),
        )


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


def pack_blocks(weight: torch.Tensor, columns: int, arena: Arena | None = None) -> torch.Tensor:
    """`[out, in]` → `[blocks, in, columns]`, for bfloat16 `[blocks, in / 2, columns, 2]`, as the kernels read.

    The result lies in `arena`, if there is one. Missing outputs of the last block are zeros.
    """
    outputs, inputs = weight.shape
    grain = 2 if weight.dtype is torch.bfloat16 else 1
    shape = (-(-outputs // columns), inputs // grain, columns, *([grain] if grain > 1 else []))
    packed = torch.empty(shape, dtype=weight.dtype) if arena is None else arena.take(shape, weight.dtype)
    whole = outputs // columns
    _transpose_blocks(weight[: whole * columns], packed[:whole])
    if outputs % columns:
        _transpose_blocks(pad_rows(weight[whole * columns :], columns), packed[whole:])
    return packed


def _transpose_blocks(weight: torch.Tensor, packed: torch.Tensor) -> None:
    """Fill whole blocks. A pair of bfloat16 numbers is copied as one of 32 bits, in half the time."""
    if weight.dtype is torch.bfloat16:
        weight = weight.clone() if weight.storage_offset() % 2 else weight.contiguous()
        weight, packed = weight.view(torch.int32), packed.view(torch.int32).squeeze(-1)
    packed.copy_(weight.reshape(len(packed), packed.shape[2], packed.shape[1]).transpose(1, 2))
