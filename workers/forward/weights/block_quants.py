"""Types of GGUF files whose numbers do not fill bytes, held in about the bytes that they have in the file.

Of k-quants (Q2_K to Q6_K), 256 inputs of an output are a super-block of groups of 16 or 32. A group has a scale, and
perhaps a minimum, of at most 8 bits; a float16 unit multiplies all of them in a super-block. The reference is that of
`ggml-quants.c` of llama.cpp: unit * scale and unit * minimum are float32 numbers, each rounded once. Groups of Q5_0 and
Q5_1 have scales and minima in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from workers.forward.weights.base import (
    Blocks,
    CutRefused,
    Grouping,
    KernelLayout,
    Kind,
    LinearKernel,
    Offset,
    Planes,
    Storage,
    Take,
    row_nbytes,
    taken_rows,
)
from workers.forward.weights.groups import GroupKernel, GroupStorage, by_block, spans
from workers.forward.weights.words import Words


@dataclass(frozen=True, slots=True)
class _Bits:
    """How the bits of values are divided in memory, as in native/packed_groups.h."""

    low: int
    """Bits of a value in the first plane."""
    high: int
    """Bits of a value in the second plane; 0 if there is none."""
    parts: int = 1
    """Unpacked bytes whose high bits share a byte."""
    low_mask: int = 0xFF
    """Where the low bits are in an unpacked byte."""
    high_mask: int = 0
    """Where the high bits are in an unpacked byte."""


_BITS = {
    Planes.WHOLE: _Bits(4, 0),
    Planes.PLANES_2: _Bits(2, 0, 2, 0x33),
    Planes.PLANES_2_1: _Bits(2, 1, 4, 0x33, 0x44),
    Planes.PLANES_4_1: _Bits(4, 1, 8, 0x0F, 0x10),
    Planes.PLANES_4_2: _Bits(4, 2, 4, 0x0F, 0x30),
}


@dataclass(frozen=True, slots=True)
class BlockQuant:
    """A type of a file."""

    name: str
    bits: int
    """4 or 8: as what the kernels multiply values, once they are unpacked."""
    planes: Planes
    group: int
    """Inputs of a group."""
    offset: Offset
    """Whether groups have minima."""
    scale_kind: Kind = Kind.SUPER_BYTES
    """What the scale and the minimum of a group are: bytes, the low and the high half of one byte, or float16."""
    zero: float = 0.0
    """The zero of all groups."""
    less: int = 0
    """What is subtracted from each unpacked value of 8 bits."""


Q2_K = BlockQuant("Q2_K", 4, Planes.PLANES_2, 16, Offset.MINIMUM, Kind.SUPER_NIBBLES)
Q3_K = BlockQuant("Q3_K", 4, Planes.PLANES_2_1, 16, Offset.NONE, zero=4.0)
Q4_K = BlockQuant("Q4_K", 4, Planes.WHOLE, 32, Offset.MINIMUM)
Q5_0 = BlockQuant("Q5_0", 8, Planes.PLANES_4_1, 32, Offset.NONE, Kind.FLOAT16, less=16)
Q5_1 = BlockQuant("Q5_1", 8, Planes.PLANES_4_1, 32, Offset.MINIMUM, Kind.FLOAT16)
Q5_K = BlockQuant("Q5_K", 8, Planes.PLANES_4_1, 32, Offset.MINIMUM)
Q6_K = BlockQuant("Q6_K", 8, Planes.PLANES_4_2, 16, Offset.NONE, less=32)


@dataclass(frozen=True, slots=True, eq=False)
class BlockQuantStorage:
    """A matrix in a type whose numbers do not fill bytes."""

    quant: BlockQuant
    low: torch.Tensor
    """The low bits of values, uint8 `[out, in * bits / 8]`: the first of neighbours in the lowest bits of a byte."""
    high: torch.Tensor | None
    """The bits above them, in the same order; `None` if there are none."""
    scale: torch.Tensor
    """int8 or float16 `[out, groups]`; or uint8: the scale in the low half of a byte, the minimum in the other."""
    minimum: torch.Tensor | None
    """float16 `[out, groups]`, what is added; int8, what is subtracted; `None` if there is none or `scale` has it."""
    scale_unit: torch.Tensor | None
    """float16 `[out, super-blocks]`: what scales are multiplied with; `None` if they are in float16."""
    minimum_unit: torch.Tensor | None
    """float16 `[out, super-blocks]`: what minima are multiplied with; `None` if they are in float16, or none."""

    @property
    def outputs(self) -> int:
        return self.scale.shape[0]

    @property
    def inputs(self) -> int:
        return self.scale.shape[1] * self.quant.group

    @property
    def super_block(self) -> int:
        """Inputs that share a unit: 256, or fewer for a rank whose inputs end within a super-block.

        Those of a group if there are no units.
        """
        return self.quant.group if self.scale_unit is None else self.inputs // self.scale_unit.shape[1]

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.outputs)

    def nbytes_of(self, outputs: int, *, on_gpu: bool = False) -> int:
        """On a GPU values have 4 or 8 bits."""
        if on_gpu:
            return self.words().nbytes_of(outputs)
        return outputs * sum(map(row_nbytes, self._tensors().values()))

    @property
    def device(self) -> torch.device:
        return self.scale.device

    @property
    def is_widened(self) -> bool:
        return True

    @property
    def plain(self) -> None:
        return None

    @property
    def has_packed_rows(self) -> bool:
        return True

    @property
    def has_own_size(self) -> bool:
        return False

    def to(self, device: torch.device) -> BlockQuantStorage:
        if device == self.device:
            return self
        return self._with({name: one.to(device) for name, one in self._tensors().items()})

    def dequantized(self) -> torch.Tensor:
        return self.grouped().dequantized()

    def take_outputs(self, outputs: slice | torch.Tensor) -> BlockQuantStorage:
        return self._with({name: taken_rows(one, outputs) for name, one in self._tensors().items()})

    def take_inputs(self, inputs: slice) -> BlockQuantStorage:
        first, last, _ = inputs.indices(self.inputs)
        group = self.quant.group
        if first % group or last % group:
            raise CutRefused(f"inputs {first} to {last} cut groups of {group} inputs into parts")
        size = gcd(self.super_block, first, last)
        bounds = {"low": 8 // _BITS[self.quant.planes].low, "scale": group, "minimum": group}
        bounds |= {"high": 8 // (_BITS[self.quant.planes].high or 8), "scale_unit": size, "minimum_unit": size}
        parts = self._tensors()
        for name in parts.keys() & {"scale_unit", "minimum_unit"}:
            parts[name] = parts[name].repeat_interleave(self.super_block // size, dim=1)
        return self._with({name: one[:, first // bounds[name] : last // bounds[name]] for name, one in parts.items()})

    def joined(self, others: Sequence[Storage]) -> Storage:
        same = [one for one in others if isinstance(one, BlockQuantStorage) and one.quant == self.quant]
        if len(same) < len(others) or any(one.super_block != self.super_block for one in same):
            return self.grouped().joined(others)
        everything = [one._tensors() for one in (self, *same)]
        return self._with({name: torch.cat([one[name] for one in everything]) for name in everything[0]})

    def kernel(self, bias: torch.Tensor | None) -> GroupKernel:
        return GroupKernel(self, bias)

    def kernel_of(self, make: Callable[[Storage], LinearKernel]) -> LinearKernel:
        return make(self)

    def words(self) -> Words:
        """The matrix as the product on GPUs reads it: values have 4 or 8 bits there, and scales those of `scale`."""
        found = self._integers().words()
        if self.scale_unit is None:
            return found
        minima = () if self.minimum_unit is None else (-self.minimum_unit,)
        units = torch.stack([one.t() for one in (self.scale_unit, *minima)], dim=1)
        return replace(found, units=units, super_groups=self.super_block // self.quant.group)

    def grouped(self) -> GroupStorage:
        """These weights in groups of 4 or 8 bits with float scales and minima: the reference of their products."""
        own = self._integers()
        scales, minima = own.scale, own.offsets
        if self.scale_unit is not None:
            scales = _times(self.scale_unit, scales.float())
        if self.minimum_unit is not None and minima is not None:
            minima = _times(self.minimum_unit, -minima.float())
        return replace(own, scale=scales, offsets=minima)

    def _integers(self) -> GroupStorage:
        """These weights in groups of 4 or 8 bits without their units: scales and minima are int8 (or float16)."""
        own, held = self.quant, self._held()
        held = held - own.less if own.less else held
        scales, minima = self.scale, self.minimum
        if own.scale_kind is Kind.SUPER_NIBBLES:
            scales, minima = (part.view(torch.int8) for part in (self.scale & 15, self.scale >> 4))
        return GroupStorage(held, scales, own.bits, own.offset, minima, own.zero)

    def blocks(self, layout: KernelLayout, take: Take) -> Blocks:
        own, columns, bits = self.quant, layout.columns, _BITS[self.quant.planes]
        groups, supers = self.super_block // own.group, self.inputs // self.super_block
        kind = self.take_outputs(slice(0, 1))._as_bytes().packed_kind(layout)
        numbers = self.scale.itemsize * (1 if self.minimum is None else 2)
        units = sum(one.itemsize for one in (self.scale_unit, self.minimum_unit) if one is not None)
        each = columns * (units + groups * (numbers + own.group * (bits.low + bits.high) // 8))
        packed = take((-(-self.outputs // columns), supers, each), torch.uint8)
        for span in spans(self.outputs, columns):
            part = self.take_outputs(span)
            *heads, values = part._as_bytes().block_pieces(kind, own.group, columns)
            whole = torch.cat([*heads, *_divided(values, bits)], dim=2)  # [blocks, groups, bytes of a group]
            found = [one for one in (part.scale_unit, part.minimum_unit) if one is not None]
            pieces = [by_block(one, columns).contiguous().view(torch.uint8) for one in found]
            out = packed[span.start // columns : span.stop // columns]
            torch.cat([*pieces, whole.view(len(whole), supers, -1)], dim=2, out=out)
        grouping = Grouping(
            group=own.group,
            scale_kind=own.scale_kind,
            offset=own.offset,
            zero=own.zero,
            order=None,
            super_groups=groups if units else 0,
            planes=own.planes,
            less=own.less,
        )
        return Blocks(kind, packed, None, grouping)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names. Each has a row for each output."""
        names = ("low", "high", "scale", "minimum", "scale_unit", "minimum_unit")
        return {name: one for name in names if (one := getattr(self, name)) is not None}

    def _with(self, tensors: dict[str, torch.Tensor]) -> BlockQuantStorage:
        changes: dict[str, Any] = tensors
        return replace(self, **changes)

    def _held(self) -> torch.Tensor:
        """The values as `GroupStorage` holds them, of which nothing is subtracted."""
        bits = _BITS[self.quant.planes]
        if bits.low == self.quant.bits:
            return self.low
        values = _unpacked(self.low, bits.low)
        if self.high is not None:
            values = values | _unpacked(self.high, bits.high) << bits.low
        return _packed(values, 4) if self.quant.bits == 4 else values.view(torch.int8)

    def _as_bytes(self) -> GroupStorage:
        """Groups whose scales and minima are not multiplied with units."""
        return GroupStorage(self._held(), self.scale, self.quant.bits, self.quant.offset, self.minimum)


_WIDE = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""Integers with a byte for each value of a packed byte, by the bits of a value."""


def block_quant(
    own: BlockQuant,
    values: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    scale_unit: torch.Tensor | None = None,
    minimum_unit: torch.Tensor | None = None,
) -> BlockQuantStorage:
    """A matrix from its values, uint8 `[out, in]`, of which nothing is subtracted; see `BlockQuantStorage`."""
    bits = _BITS[own.planes]
    low = _packed(values & (1 << bits.low) - 1, bits.low)
    high = _packed(values >> bits.low, bits.high) if bits.high else None
    return BlockQuantStorage(own, low, high, scales, minima, scale_unit, minimum_unit)


def _times(units: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of groups `[out, groups]` times the units of their super-blocks `[out, super-blocks]`, float32."""
    products: torch.Tensor = units.float()[..., None] * numbers.view(*units.shape, numbers.shape[1] // units.shape[1])
    return products.flatten(1)


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[out, n]` of values of so many bits → `[out, n * bits / 8]`."""
    wide = values.view(_WIDE[bits])  # a number for the values of a byte; shifts bring them together
    packed = wide
    for shift in _shifts(bits):
        packed = packed | wide >> shift
    return packed.to(torch.uint8)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """What `_packed` made of values: uint8 `[out, n]`."""
    wide = packed.to(_WIDE[bits])
    values = wide
    for shift in _shifts(bits):
        values = values | wide << shift
    return (values & _repeated((1 << bits) - 1, 8 // bits)).view(torch.uint8)


def _shifts(bits: int) -> list[int]:
    """From where values are in bytes of their own to where they are in one, all but the first."""
    return [index * (8 - bits) for index in range(1, 8 // bits)]


def _repeated(byte: int, times: int) -> int:
    """A number of so many equal bytes."""
    return int.from_bytes(bytes([byte]) * times, "little")


def _divided(values: torch.Tensor, bits: _Bits) -> list[torch.Tensor]:
    """Unpacked bytes uint8 `[blocks, groups, n]` as planes: see native/packed_groups.h."""
    if bits.parts == 1:
        return [values]
    parts = values.reshape(*values.shape[:2], bits.parts, -1)
    first, second = (parts & bits.low_mask).chunk(2, dim=2)
    planes = [(first | second << bits.low).flatten(2)]
    if bits.high:
        above = torch.zeros_like(parts[:, :, 0])
        for index, part in enumerate((parts & bits.high_mask).unbind(2)):
            by = bits.low - bits.high * index
            above |= part >> by if by > 0 else part << -by
        planes.append(above)
    return planes
