"""What every storage of a matrix is and can do: see `Storage`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Protocol, Self

import torch

from workers.forward.weights.words import Words

Take = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocates a tensor of a shape and a type, for packed weights. Its values are undefined or zeros."""


class CutRefused(ValueError):
    """A matrix cannot be divided between ranks where they would divide it."""


class NoGpuProduct(ValueError):
    """GPUs have no product for a storage, or a wrong one."""


class Kind(IntEnum):
    """How the CPU kernels read a packed matrix; as in native/numbers.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_TILES = 3
    """INT8 in the order of tile registers and VNNI: rows are split into integers, too."""
    GROUPS4 = 4
    """Integers of 4 bits, with a scale for each group of inputs."""
    GROUPS8 = 5
    """Integers of 8 bits, with a scale for each group of inputs."""
    GROUPS_E4M3 = 6
    """Floats of 8 bits, with a scale for each group of inputs."""
    GROUPS_TABLE = 7
    """4 bits that choose a number from a table, with a scale for each group of inputs."""
    GROUPS4_TILES = 8
    """GROUPS4, multiplied as integers: the groups of rows are split into integers, too."""
    GROUPS8_TILES = 9
    """GROUPS8 in the order of tile registers and VNNI, multiplied as integers."""
    FLOAT16 = 10
    """A kind of scales alone."""
    SUPER_BYTES = 12
    """A kind of scales alone: bytes that a float16 unit of a super-block is multiplied with."""
    SUPER_NIBBLES = 13
    """A kind of scales alone: bytes of a scale and a minimum in 4 bits, each times a float16 unit of a super-block."""


class Planes(IntEnum):
    """How the bits of values are divided in memory; as in native/products.h."""

    WHOLE = 0
    PLANES_2 = 1
    """Two bits of values that are unpacked to 4."""
    PLANES_2_1 = 2
    """Two bits, then one bit, of values that are unpacked to 4."""
    PLANES_4_1 = 3
    """Four bits, then one bit, of values that are unpacked to 8."""
    PLANES_4_2 = 4
    """Four bits, then two bits, of values that are unpacked to 8."""


class Offset(IntEnum):
    """What a group has beside its scale; as in native/products.h."""

    NONE = 0
    """All groups have one zero: a weight is scale * (value - zero)."""
    ZERO = 1
    """A zero of its own: a weight is scale * (value - zero)."""
    MINIMUM = 2
    """A minimum: a weight is scale * value + minimum."""


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """What `Blocks` of groups say beside their weight; as in native/products.h."""

    group: int
    """Inputs of a group."""
    scale_kind: Kind
    offset: Offset
    zero: float
    """The zero of all groups, for `Offset.NONE`."""
    order: torch.Tensor | None
    """int32 `[in]`: which input of a row belongs to each weight; `None` if they are in order."""
    table: torch.Tensor | None = None
    """float32 `[16]`: what values choose from, for `Kind.GROUPS_TABLE`."""
    super_groups: int = 0
    """Groups of a super-block, whose scales are multiplied with its unit; 0 without super-blocks."""
    planes: Planes = Planes.WHOLE
    less: int = 0
    """What is subtracted from unpacked values of 8 bits."""


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """What the packed form of a matrix depends on beside its storage."""

    columns: int
    """Outputs of a block: two vector registers of the processor."""
    multiplies_integers: Callable[[int], bool]
    """Whether int8 weights with this number of inputs are packed for products of integers (AMX, VNNI)."""
    multiplies_groups: Callable[[int], bool]
    """Whether weights in groups of this number of inputs are packed for products of integers (AMX, VNNI)."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix as the CPU kernels read it: see native/products.h."""

    kind: Kind
    weight: torch.Tensor
    """Blocks of outputs, one after another: `[blocks, …]`."""
    scale: torch.Tensor | None = None
    """One scale per output, float32 `[blocks * columns]`."""
    grouping: Grouping | None = None
    """Set for groups."""


class LinearKernel(Protocol):
    """Weights in some layout, and the multiplication with them."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`. On CPU no row's product depends on the other rows."""


class Storage(Protocol):
    """A matrix `[out, in]` as it is stored, and all that depends on how it is.

    No other code asks which storage a matrix has. Values are immutable; parts share memory where they can.
    """

    @property
    def outputs(self) -> int:
        """Number of outputs."""

    @property
    def inputs(self) -> int:
        """Number of inputs."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the storage."""

    def nbytes_of(self, outputs: int, *, on_gpu: bool = False) -> int:
        """Bytes of all tensors if the matrix had so many outputs; `on_gpu`: once it is packed for products there.

        Raises `NoGpuProduct` if GPUs have no product for it.
        """

    @property
    def device(self) -> torch.device:
        """Where the stored numbers are."""

    @property
    def is_widened(self) -> bool:
        """Whether torch multiplies only a widened copy of the numbers, so that Pilotfish's kernels are faster."""

    @property
    def plain(self) -> torch.Tensor | None:
        """The numbers `[out, in]` if they are stored as plain ones; `None` for others."""

    @property
    def has_packed_rows(self) -> bool:
        """Whether the CPU kernels read single rows of packed blocks, to the bits of `dequantized`."""

    @property
    def has_own_size(self) -> bool:
        """Whether another matrix of the same shapes and types may take other bytes."""

    def to(self, device: torch.device) -> Self:
        """The matrix on a device; the same object if it is there already."""

    def dequantized(self) -> torch.Tensor:
        """The matrix that this storage stands for, float32 `[out, in]`: the reference for every product."""

    def take_outputs(self, outputs: slice | torch.Tensor) -> Self:
        """Some of the outputs, in the given order: a rank's share, or another order. An index of −1 gives zeros."""

    def take_inputs(self, inputs: slice) -> Self:
        """Some of the inputs: a rank's share. Raises `CutRefused` if that cuts what has one scale into two."""

    def joined(self, others: Sequence[Storage]) -> Storage:
        """The outputs of this matrix, then those of others with the same inputs."""

    def kernel(self, bias: torch.Tensor | None) -> LinearKernel:
        """Products by torch's operators, on the device of the weights. `bias` is `[out]`, or none."""

    def kernel_of(self, make: Callable[[Storage], LinearKernel]) -> LinearKernel:
        """The product, by the kernel that `make` returns for the matrix that multiplies: this one, or its columns."""

    def words(self) -> Words:
        """The matrix as the product on GPUs reads it, on the device of the stored numbers, as small as they are.

        Raises `NoGpuProduct` for a storage that it does not read.
        """

    def blocks(self, layout: KernelLayout, take: Take) -> Blocks:
        """The matrix as the CPU kernels read it, its weight in a tensor from `take`."""


def stay_apart(storages: Sequence[Storage]) -> bool:
    """Whether matrices of the same inputs stay as they are: as one, they would take more bytes or be rounded."""
    if len({one.is_widened for one in storages}) > 1:  # some are plain numbers, and all of one matrix would be
        return True
    first, *others = (one.take_outputs(slice(0, 1)) for one in storages)
    return _output_nbytes(first.joined(others)) * len(storages) > sum(map(_output_nbytes, (first, *others)))


def _output_nbytes(storage: Storage) -> int:
    """Bytes of an output, without those of what all outputs share."""
    return storage.nbytes_of(1) - storage.nbytes_of(0)


def row_nbytes(values: torch.Tensor | None) -> int:
    """Bytes of a row of `[out, …]`, or of nothing."""
    return 0 if values is None else values.itemsize * prod(values.shape[1:])


def joined_runs(storages: Sequence[Storage]) -> list[Storage]:
    """The outputs of all, in their order, in as few matrices as keep each as it is stored."""
    runs: list[list[Storage]] = [[storages[0]]]
    for one in storages[1:]:
        if stay_apart([*runs[-1], one]):
            runs.append([one])
        else:
            runs[-1].append(one)
    return [run[0].joined(run[1:]) if len(run) > 1 else run[0] for run in runs]


def taken_rows(values: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Rows of `[out, …]` in the given order; zeros for an index of −1."""
    if isinstance(rows, slice):
        return values[rows]
    taken = values.index_select(0, rows.clamp(min=0))
    if values.device.type == "cpu" and bool((rows >= 0).all()):  # on a GPU, the host would wait
        return taken
    return taken.masked_fill_((rows < 0).view(-1, *[1] * (taken.dim() - 1)), 0)


def pad_rows(values: torch.Tensor, grain: int) -> torch.Tensor:
    """Pad `[out, …]` with zeros to a multiple of `grain` rows."""
    missing = -len(values) % grain
    widths: Sequence[int] = (*(0, 0) * (values.dim() - 1), 0, missing)
    return torch.nn.functional.pad(values, widths) if missing else values


def pack_blocks(weight: torch.Tensor, columns: int, take: Take, *, on_tiles: bool = False) -> torch.Tensor:
    """`[out, in]` → `[blocks, in, columns]`, as the kernels read.

    For bfloat16 it is `[blocks, in / 2, columns, 2]`, for int8 `on_tiles` `[blocks, in / 4, columns, 4]`. Missing
    outputs of the last block are zeros.
    """
    outputs, inputs = weight.shape
    grain = 4 if on_tiles else 2 if weight.dtype is torch.bfloat16 else 1
    packed = take((-(-outputs // columns), inputs // grain, columns, *([grain] if grain > 1 else [])), weight.dtype)
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
