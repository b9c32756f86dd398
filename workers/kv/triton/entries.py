"""Copies of slots or of whole blocks within a pool, for all rows of a step and all layers in one launch.

`workers.kv.copies.copy_entries` is the reference. A record is the keys or the values of one layer. An entry is a slot
of each record, or a block of each. The bytes of entries are copied as they are, so that the scales of 8-bit numbers,
which lie in the same records, go with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_NUMBERS, _TOGETHER = 2048, 16
"""Numbers of a program's tile, and most entries of a path that it holds at once."""
_WIDEST = 16
"""Bytes of the widest load. Entries of other sizes are copied in numbers whose size divides them."""
_TYPES = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Where the records of a pool are."""

    table: torch.Tensor
    """int64 `[records, 2]`: the address, and the number of numbers in a slot."""
    like: torch.Tensor
    """A tensor of the type in which numbers are copied."""
    most: int
    """Numbers in the largest slot."""
    is_aligned: bool
    """Whether all slots begin at multiples of 16 bytes."""


def records_of(stacks: Sequence[torch.Tensor]) -> Records:
    """The records of a pool's stacks `[records, blocks, block size, …]`, which stay where they are."""
    device = stacks[0].device
    sizes = [stack[0, 0, 0].nbytes for stack in stacks]
    places = [(record.data_ptr(), size) for stack, size in zip(stacks, sizes, strict=True) for record in stack.unbind()]
    unit = math.gcd(_WIDEST, *(number for place in places for number in place))
    dtype = _TYPES[unit]
    table = torch.tensor([(address, size // dtype.itemsize) for address, size in places], dtype=torch.int64)
    like = stacks[0].flatten().view(dtype)
    return Records(table.to(device), like, max(sizes) // dtype.itemsize, unit == _WIDEST)


def copy_paths(
    records: Records, ends: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, slots: int = 1
) -> None:
    """Copy entries of so many slots along paths: path `i` copies `sources[ends[i]:ends[i + 1]]` to `destinations`.

    All three are int64. An entry is one slot, or a block, whose path has no other one. Along a path of slots, sources
    and destinations ascend by position, and no source lies before its destination: all sources are read before they
    are written. Paths have no entry in common.
    """
    together = _TOGETHER if slots == 1 else 1
    width = _NUMBERS // together
    parts = triton.cdiv(records.most * slots, width)
    copy_entries[(len(ends) - 1, len(records.table), parts)](
        records.like, records.table, ends, sources, destinations, slots,
        IS_ALIGNED=records.is_aligned, TOGETHER=together, WIDTH=width, num_warps=4,
    )  # fmt: skip


# An entry has one slot or those of a block: there are two kernels.
@triton.jit
def copy_entries(
    like, table, ends, sources, destinations, slots,
    IS_ALIGNED: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy a part of the entries of one path in one record.

    A program holds a part of several entries in registers, and stores it when all its threads have loaded theirs. What
    it stores lies before all that it loads later.
    """
    path, record = tl.program_id(0), table + 2 * tl.program_id(1)
    size = tl.load(record + 1) * slots
    stored = tl.load(record).to(tl.pointer_type(like.dtype.element_ty))
    number = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    if IS_ALIGNED:
        size, stored = tl.multiple_of(size, 2), tl.multiple_of(stored, 16)
    end = tl.load(ends + path + 1)
    for first in range(tl.load(ends + path), end, TOGETHER):
        index = first + tl.arange(0, TOGETHER)
        source = tl.load(sources + index, mask=index < end, other=0)
        destination = tl.load(destinations + index, mask=index < end, other=0)
        is_copied = (source != destination)[:, None] & (number < size)[None, :]
        held = tl.load(stored + source[:, None] * size + number[None, :], mask=is_copied)
        tl.debug_barrier()  # a thread stores where another one may have to load
        tl.store(stored + destination[:, None] * size + number[None, :], held, mask=is_copied)
