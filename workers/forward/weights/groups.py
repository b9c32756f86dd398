"""Weights of 4 or 8 bits in groups: neighbouring inputs of an output share a scale, and perhaps a zero or a minimum.

GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, GPTQ, AWQ and compressed-tensors are such weights, with integers for values. FP8
has floats, MXFP4 and NF4 have values that choose a number from a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from workers.forward.weights.base import (
    Blocks,
    CutRefused,
    Grouping,
    KernelLayout,
    Kind,
    LinearKernel,
    NoGpuProduct,
    Offset,
    Storage,
    Take,
    pad_rows,
    row_nbytes,
    taken_rows,
)
from workers.forward.weights.plain import DenseKernel, PlainStorage
from workers.forward.weights.words import (
    BLOCK,
    Values,
    Words,
    added_by_widening,
    chunk_for,
    counters_for,
    pack_words,
    splits_of,
    step_inputs,
)

_SCALES = {torch.float16: Kind.FLOAT16, torch.bfloat16: Kind.BFLOAT16, torch.float32: Kind.FLOAT32}
_SLICE_OUTPUTS = 256  # weights are widened for so many outputs at a time, which the caches hold
_SLICE_BLOCKS = 64
"""Blocks of outputs that are packed at a time, so that a large matrix has no second copy beside the packed one."""
_WORD = 8
"""Values of 4 bits in a word."""
E2M1 = (*(own := (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)), *(-value for value in own))
"""The 4-bit floats of MXFP4, in the order of their bits."""


@runtime_checkable
class Grouped(Protocol):
    """A storage whose weights are in groups, which it holds in other numbers."""

    def grouped(self) -> GroupStorage:
        """This storage's weights in groups with float scales, bit for bit."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupStorage:
    """A matrix of small values. The groups of an output are neighbouring inputs, all of one size."""

    values: torch.Tensor
    """`[out, in]` int8, or for 4 bits `[out, in / 2]` uint8: input 2 i is in the low half of byte i.

    Floats of 8 bits are uint8 `[out, in]`, since torch does little with their own type.
    """
    scale: torch.Tensor
    """float16, bfloat16 or float32 `[out, groups]`."""
    bits: int
    """4 or 8. Values of 4 bits are 0 to 15."""
    offset: Offset = Offset.NONE
    offsets: torch.Tensor | None = None
    """The zero or the minimum of each group, in the type of the scales `[out, groups]`."""
    zero: float = 0.0
    """The zero of all groups, for `Offset.NONE`."""
    order: torch.Tensor | None = None
    """int64 `[in]`: the input to which each stored column belongs; `None` if they are in order."""
    table: torch.Tensor | None = None
    """float32 `[16]`: the numbers that values of 4 bits choose from; `None` if values are numbers themselves."""

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.inputs // self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.outputs)

    def nbytes_of(self, outputs: int, *, on_gpu: bool = False) -> int:
        if on_gpu:
            return self.words().nbytes_of(outputs)
        shared = sum(one.nbytes for one in (self.order, self.table) if one is not None)
        return outputs * sum(map(row_nbytes, (self.values, self.scale, self.offsets))) + shared

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_widened(self) -> bool:
        return True

    @property
    def kind(self) -> Kind:
        """What the values are."""
        if self.bits == 8:
            return Kind.GROUPS8 if self.values.dtype is torch.int8 else Kind.GROUPS_E4M3
        return Kind.GROUPS4 if self.table is None else Kind.GROUPS_TABLE

    @property
    def plain(self) -> None:
        return None

    @property
    def has_packed_rows(self) -> bool:
        return True

    @property
    def has_own_size(self) -> bool:
        return False

    def to(self, device: torch.device) -> GroupStorage:
        if device == self.device:
            return self
        values, scale = self.values.to(device), self.scale.to(device)
        offsets, order, table = (
            None if part is None else part.to(device) for part in (self.offsets, self.order, self.table)
        )
        return replace(self, values=values, scale=scale, offsets=offsets, order=order, table=table)

    def integers(self) -> torch.Tensor:
        """The values, int8 `[out, in]`."""
        if self.bits == 8:
            return self.values
        return torch.stack([self.values & 15, self.values >> 4], dim=2).flatten(1).view(torch.int8)

    def numbers(self) -> torch.Tensor:
        """What the values are without their scales, float32 `[out, in]`."""
        if self.kind is Kind.GROUPS_E4M3:
            return self.values.contiguous().view(torch.float8_e4m3fn).float()
        return self.integers().float() if self.table is None else self.table[self.integers().int()]

    def dequantized(self) -> torch.Tensor:
        values = self.numbers().view(self.outputs, -1, self.group)
        scale = self.scale.float()[..., None]
        if self.offsets is None:
            weight = (values - self.zero) * scale
        elif self.offset is Offset.ZERO:
            weight = (values - self.offsets.float()[..., None]) * scale
        else:
            weight = values * scale + self.offsets.float()[..., None]
        weight = weight.flatten(1)
        if self.order is None:
            return weight
        found = torch.empty_like(weight)
        found[:, self.order] = weight
        return found

    def take_outputs(self, outputs: slice | torch.Tensor) -> GroupStorage:
        offsets = None if self.offsets is None else taken_rows(self.offsets, outputs)
        return replace(
            self, values=taken_rows(self.values, outputs), scale=taken_rows(self.scale, outputs), offsets=offsets
        )

    def take_inputs(self, inputs: slice) -> GroupStorage:
        first, last, _ = inputs.indices(self.inputs)
        if self.order is not None:
            raise CutRefused("weights in activation order (g_idx) cannot be cut along their inputs")
        if first % self.group or last % self.group:
            raise CutRefused(f"inputs {first} to {last} cut groups of {self.group} inputs into parts")
        groups, each = slice(first // self.group, last // self.group), 2 if self.bits == 4 else 1
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(
            self, values=self.values[:, first // each : last // each], scale=self.scale[:, groups], offsets=offsets
        )

    def joined(self, others: Sequence[Storage]) -> Storage:
        others = [one.grouped() if isinstance(one, Grouped) else one for one in others]
        same = [one for one in others if isinstance(one, GroupStorage) and self._is_like(one)]
        if len(same) < len(others):
            return _joined_as_widest(self, others)
        everything = (self, *same)
        offsets = [one.offsets for one in everything if one.offsets is not None]
        return replace(
            self,
            values=torch.cat([one.values for one in everything]),
            scale=torch.cat([one.scale for one in everything]),
            offsets=torch.cat(offsets) if offsets else None,
        )

    def _is_like(self, other: GroupStorage) -> bool:
        """Whether both can be rows of one matrix as they are."""
        own, others = ((one.kind, one.scale.dtype, one.offset, one.zero, one.group) for one in (self, other))
        return own == others and _are_equal(self.order, other.order) and _are_equal(self.table, other.table)

    def kernel(self, bias: torch.Tensor | None) -> GroupKernel:
        return GroupKernel(self, bias)

    def kernel_of(self, make: Callable[[Storage], LinearKernel]) -> LinearKernel:
        return make(self)

    def words(self) -> Words:
        values = self._gpu_values()
        chunk = chunk_for(values, self.inputs, self.group)
        if chunk is None:
            raise NoGpuProduct(f"groups of {self.group} inputs; their size must be a multiple of 16 that fits steps")
        words = torch.cat(
            [pack_words(_unsigned(self.take_outputs(span)), self.bits, chunk) for span in spans(self.outputs, BLOCK)]
        )
        step = step_inputs(values, chunk)
        added = added_by_widening(values)
        return Words(
            words=words,
            scale=self.scale.t().contiguous(),
            offset=None if self.offsets is None else self.offsets.t().contiguous(),
            counters=counters_for(self.outputs, self.device),
            values=values,
            outputs=self.outputs,
            inputs=self.inputs,
            chunk=chunk,
            step_group=step if self.group == self.inputs else min(self.group, step),
            group_steps=words.shape[1] if self.group == self.inputs else max(1, self.group // step),
            splits=splits_of(self.outputs, words.shape[1]),
            has_minimum=self.offset is Offset.MINIMUM,
            has_zero=self.offset is Offset.ZERO or added != self.zero,
            zero=added - self.zero,
            order=self.order,
            table=self.table if values is Values.TABLE else None,
        )

    def _gpu_values(self) -> Values:
        """What the values are to the Triton product. Raises `NoGpuProduct`."""
        if self.kind is Kind.GROUPS4:
            return Values.INTEGERS4
        if self.kind is Kind.GROUPS8:
            return Values.INTEGERS8
        if self.offsets is None and self.zero == 0.0:
            if self.kind is Kind.GROUPS_E4M3:
                return Values.E4M3
            if self.table is not None:
                is_e2m1 = torch.equal(self.table.cpu(), torch.tensor(E2M1))
                return Values.E2M1 if is_e2m1 else Values.TABLE
        raise NoGpuProduct("floats of 8 bits, or values that choose from a table, with a zero or a minimum")

    def blocks(self, layout: KernelLayout, take: Take) -> Blocks:
        columns, kind = layout.columns, self.packed_kind(layout)
        size = _padded_group(self, whole_words=kind not in (Kind.GROUPS8, Kind.GROUPS_E4M3))
        scales = self.scale.itemsize * (1 if self.offsets is None else 2)
        each = columns * (scales + size * self.bits // 8)  # bytes of a group of all columns
        packed = take((-(-self.outputs // columns), self.scale.shape[1], each), torch.uint8)
        for span in spans(self.outputs, columns):
            own = packed[span.start // columns : span.stop // columns]
            torch.cat(self.take_outputs(span).block_pieces(kind, size, columns), dim=2, out=own)
        order = None if self.order is None else self.order.to(torch.int32).contiguous()
        grouping = Grouping(size, _SCALES[self.scale.dtype], self.offset, self.zero, order, self.table)
        return Blocks(kind, packed, None, grouping)

    def block_pieces(self, kind: Kind, size: int, columns: int) -> list[torch.Tensor]:
        """What each group of `size` inputs has in its blocks: scales, offsets, values; uint8 `[blocks, groups, …]`."""
        groups = self.scale.shape[1]
        parts = [by_block(self.scale, columns)]  # [blocks, groups, columns]
        if self.offsets is not None:
            parts.append(by_block(self.offsets, columns))
        values = self.values
        if self.group != size:  # only a single group may be padded
            values = torch.nn.functional.pad(values, (0, (size - self.group) // (2 if self.bits == 4 else 1)))
        if kind is Kind.GROUPS8_TILES:  # of eight neighbours the even ones first, as 4-bit words are widened
            values = values.view(self.outputs, -1, _WORD // 2, 2).transpose(2, 3)
        if kind in (Kind.GROUPS8, Kind.GROUPS_E4M3):
            words = values.contiguous().view(self.outputs, groups, size)
        else:
            words = values.contiguous().view(self.outputs, -1).view(torch.int32).view(self.outputs, groups, -1)
        blocks = pad_rows(words, columns).view(-1, columns, *words.shape[1:]).permute(0, 2, 3, 1)
        parts.append(blocks)  # [blocks, groups, 32-bit words or bytes of a group, columns]
        return [part.contiguous().view(torch.uint8).reshape(len(part), groups, -1) for part in parts]

    def packed_kind(self, layout: KernelLayout) -> Kind:
        """How the CPU kernels read the packed values."""
        as_integers = {Kind.GROUPS4: Kind.GROUPS4_TILES, Kind.GROUPS8: Kind.GROUPS8_TILES}.get(self.kind)
        whole = self.scale.shape[1] == 1 or self.group % _WORD == 0  # a single group is padded
        if as_integers is None or not whole or not layout.multiplies_groups(-(-self.group // _WORD) * _WORD):
            return self.kind
        return as_integers


@dataclass(slots=True)
class GroupKernel:
    """Products by torch's operators, with weights that are widened slice by slice."""

    storage: Storage
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. On CPU no row's product depends on the other rows."""
        flat = x.flatten(0, -2)
        spans = (slice(first, first + _SLICE_OUTPUTS) for first in range(0, self.storage.outputs, _SLICE_OUTPUTS))
        slices = (self.storage.take_outputs(span).dequantized().to(x.dtype) for span in spans)
        product = torch.cat([DenseKernel(part, None).multiply(flat) for part in slices], dim=-1)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], -1)


def spans(outputs: int, block: int) -> Iterator[slice]:
    """Outputs in parts of whole blocks of `block` outputs, so that few are widened or packed at a time."""
    size = _SLICE_BLOCKS * block
    return (slice(first, first + size) for first in range(0, outputs, size))


def _unsigned(storage: GroupStorage) -> torch.Tensor:
    """The values of `storage` as `Values` says, uint8 `[out, in]`."""
    values = storage.integers().view(torch.uint8)
    return values ^ 128 if storage.kind is Kind.GROUPS8 else values


def _are_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def pairs(values: torch.Tensor) -> torch.Tensor:
    """Values of 4 bits uint8 `[out, …]` → bytes `[out, in / 2]`, neighbours in one byte."""
    flat = values.flatten(1)
    return flat[:, ::2] | flat[:, 1::2] << 4


def _padded_group(storage: GroupStorage, *, whole_words: bool) -> int:
    """Inputs of a group as the kernels read it."""
    grain = _WORD if whole_words else 1
    size = -(-storage.group // grain) * grain
    if size != storage.group and storage.scale.shape[1] > 1:
        raise ValueError(f"groups of {storage.group} inputs in 4 bits are refused; their size must be a multiple of 8")
    return size


def by_block(numbers: torch.Tensor, columns: int) -> torch.Tensor:
    """`[out, groups]` → `[blocks, groups, columns]`."""
    return pad_rows(numbers, columns).view(-1, columns, numbers.shape[1]).transpose(1, 2)


def _joined_as_widest(first: GroupStorage, others: Sequence[Storage]) -> Storage:
    """Matrices of different storages as one: in 8 bits with minima in float32 if all are groups, else plain numbers."""
    groups = [_signed(one) for one in (first, *others) if isinstance(one, GroupStorage)]
    groups = [one for one in groups if _has_exact_minima(one)]
    if len(groups) <= len(others):
        return _plain(first, others)
    size = min(one.group for one in groups)
    if any(one.group % size for one in groups):
        return _plain(first, others)
    wide = [_widest(one, size) for one in groups]
    return wide[0].joined(wide[1:])


def _plain(first: GroupStorage, others: Sequence[Storage]) -> PlainStorage:
    """Matrices as plain numbers, in the type of those that are plain already."""
    dtype = next((one.weight.dtype for one in others if isinstance(one, PlainStorage)), torch.float32)
    return PlainStorage(first.dequantized().to(dtype)).joined(others)


def _signed(storage: GroupStorage) -> GroupStorage:
    """The weights of `storage` in 8 bits without a zero, if its values are of 4 bits and have one that is whole."""
    zero = storage.zero
    if storage.kind is not Kind.GROUPS4 or storage.offsets is not None or not (zero.is_integer() and abs(zero) <= 112):
        return storage
    return replace(storage, values=storage.integers() - int(zero), bits=8, zero=0.0)


def _has_exact_minima(storage: GroupStorage) -> bool:
    """Whether the weights are the same with minima instead of zeros: products of float32 scales may be rounded."""
    is_exact = storage.offset is Offset.MINIMUM or storage.scale.dtype is not torch.float32
    has_integers = storage.kind in (Kind.GROUPS4, Kind.GROUPS8)
    return has_integers and storage.order is None and (is_exact or (storage.offsets is None and storage.zero == 0.0))


def _widest(storage: GroupStorage, group: int) -> GroupStorage:
    """Return the weights of `storage` in 8 bits with float32 scales and minima, in groups of this size."""
    scale = storage.scale.float()
    if storage.offsets is None:
        minimum = -storage.zero * scale
    elif storage.offset is Offset.ZERO:
        minimum = -storage.offsets.float() * scale
    else:
        minimum = storage.offsets.float()
    times = storage.group // group
    scale, minimum = (part.repeat_interleave(times, dim=1) for part in (scale, minimum))
    return GroupStorage(storage.integers(), scale, 8, Offset.MINIMUM, minimum)
