"""How matrices of 4 or 8 bits in groups lie in memory for the Triton product, and the tiles of its launches.

The inputs of an output are divided into steps, and a step into chunks of neighbouring inputs: 8 chunks for values of 4
bits, 4 for those of 8. Word `j` of a step holds the values of input `j` of each chunk; even chunks are in its low half.
The words of a step of `BLOCK` outputs are neighbours. Nothing here needs the package `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

BLOCK = 64
"""Outputs whose words of a step lie together."""
CHUNKS = (32, 16)
"""Inputs of a chunk. Wider ones need fewer operations."""
_PROGRAMS = 256
"""Programs that a matrix is divided into if it has enough steps: about two for each multiprocessor of an H100."""
_LEAST_STEPS = 2
"""Steps of a split."""
_MOST_APART = 64
"""Rows up to which splits are computed apart. Beyond, their sums are larger than the weights."""


class Values(IntEnum):
    """What values are."""

    INTEGERS4 = 0
    """Integers from 0 to 15."""
    INTEGERS8 = 1
    """Integers from -128 to 127, held 128 too large."""
    E4M3 = 2
    """Floats of 8 bits."""
    E2M1 = 3
    """Floats of 4 bits."""
    TABLE = 4
    """4 bits that choose from a table of 16 numbers."""


_OF_4_BITS = frozenset({Values.INTEGERS4, Values.E2M1, Values.TABLE})


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A matrix on its device."""

    words: torch.Tensor
    """int32 `[blocks, steps, BLOCK, chunk]`."""
    scale: torch.Tensor
    """`[groups, outputs]`."""
    offset: torch.Tensor | None
    """The zero or the minimum of each group, `[groups, outputs]`."""
    counters: torch.Tensor
    """int32, zeros between launches: how many splits of each tile have ended."""
    values: Values
    outputs: int
    inputs: int
    chunk: int
    step_group: int
    """Inputs of a group, at most those of a step."""
    group_steps: int
    """Steps of a group, at least 1."""
    splits: int
    """Parts of the inputs, whose sums are added one after another."""
    has_minimum: bool
    """Whether `offset` holds minima."""
    has_zero: bool
    """Whether something is subtracted from values."""
    zero: float
    """What is added to each value as it is widened: the negated zero of all groups, less what widening adds."""
    order: torch.Tensor | None
    """int64 `[inputs]`: the input to which each column belongs; `None` if they are in order."""
    units: torch.Tensor | None = None
    """float16 `[super-blocks, 1 or 2, outputs]`: what integers in `scale` and in `offset` are multiplied with."""
    super_groups: int = 0
    """Groups that share a unit; 0 without units."""
    table: torch.Tensor | None = None
    """float32 `[16]`: what values choose from, for `Values.TABLE`."""

    @property
    def steps(self) -> int:
        """Steps of an output."""
        return self.words.shape[1]

    @property
    def has_tail(self) -> bool:
        """Whether the last step is padded."""
        return self.inputs % step_inputs(self.values, self.chunk) != 0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Outputs `ids`, int64 `[rows]`, of the matrix → float32 `[rows, inputs]`, to the bits of `dequantized`.

        The host waits for nothing.
        """
        packed = self.words[ids // BLOCK, :, ids % BLOCK].contiguous().view(torch.uint8)  # [rows, steps, 4 * chunk]
        numbers = self._numbers(packed.view(len(ids), self.steps, self.chunk, 4).transpose(2, 3))
        numbers = numbers.flatten(1)[:, : self.inputs].view(len(ids), len(self.scale), -1)  # [rows, groups, inputs]
        scale = self._of_groups(self.scale, 0, ids)
        if self.offset is None:
            weight = (numbers - (added_by_widening(self.values) - self.zero)) * scale
        elif self.has_minimum:
            weight = numbers * scale + self._of_groups(self.offset, 1, ids)
        else:
            weight = (numbers - self._of_groups(self.offset, 1, ids)) * scale
        weight = weight.flatten(1)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _of_groups(self, numbers: torch.Tensor, unit: int, ids: torch.Tensor) -> torch.Tensor:
        """Scales, zeros or minima `[groups, outputs]` of some, times their units, float32 `[rows, groups, 1]`."""
        found = numbers[:, ids].float()
        if self.units is not None:
            units = self.units[:, unit, ids].float()
            found = (units[:, None] * found.view(len(units), self.super_groups, -1)).flatten(0, 1)
        return found.t()[..., None]

    def _numbers(self, packed: torch.Tensor) -> torch.Tensor:
        """The bytes of words, uint8 `[rows, steps, 4, chunk]` → their numbers, float32 `[rows, steps, each, chunk]`."""
        if self.values in _OF_4_BITS:
            nibbles = torch.stack([packed & 15, packed >> 4], dim=2)  # [rows, steps, 2, 4, chunk]
            whole = torch.stack([nibbles[:, :, :, :2], nibbles[:, :, :, 2:]], dim=4)  # low and high halves of words
            held = whole.transpose(2, 3).flatten(2, 4)
        else:
            held = torch.stack([packed[:, :, :2], packed[:, :, 2:]], dim=3).flatten(2, 3)
        if self.table is not None:
            return self.table[held.int()]
        if self.values is Values.INTEGERS8:
            return held.float() - 128.0
        if self.values is Values.E4M3:
            return held.view(torch.float8_e4m3fn).float()
        if self.values is Values.E2M1:  # its bits in a float16, whose exponents have another bias
            wide = held.to(torch.int32)
            return ((wide & 7) << 9 | (wide & 8) << 12).to(torch.int16).view(torch.float16).float() * 16384.0
        return held.float()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.nbytes_of(self.outputs)

    def nbytes_of(self, outputs: int) -> int:
        """Bytes of all tensors if the matrix had so many outputs."""
        each = sum(one.nbytes for one in (self.scale, self.offset, self.units) if one is not None) // self.outputs
        shared = sum(one.nbytes for one in (self.order, self.table) if one is not None)
        blocks, counters = -(-outputs // BLOCK), tiles_of(outputs) * self.counters.itemsize
        return blocks * self.words[:1].nbytes + outputs * each + counters + shared


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The tiles of a launch."""

    rows: int
    outputs: int
    warps: int
    stages: int
    splits_apart: bool
    """Whether each split has a program of its own."""


def launch_shape(rows: int) -> LaunchShape:
    """The tiles for a number of rows. Tiles of 64 rows would use other instructions, which may round otherwise."""
    if rows <= 16:
        return LaunchShape(16, 64, 4, 4, splits_apart=True)
    if rows <= _MOST_APART:
        return LaunchShape(32, 128, 4, 3, splits_apart=True)
    return LaunchShape(32, 128, 8, 3, splits_apart=False)


def step_inputs(values: Values, chunk: int) -> int:
    """Inputs of a step."""
    return chunk * (8 if values in _OF_4_BITS else 4)


def chunk_for(values: Values, inputs: int, group: int) -> int | None:
    """Inputs of a chunk, for groups of `group` inputs; `None` if groups do not consist of chunks, or steps of groups.

    The widest chunk is taken that needs no more padding than a narrower one.
    """
    fitting = [
        chunk
        for chunk in CHUNKS
        if group == inputs
        or (group % chunk == 0 and 0 in (group % step_inputs(values, chunk), step_inputs(values, chunk) % group))
    ]
    padding = {chunk: -inputs % step_inputs(values, chunk) for chunk in fitting}
    return min(fitting, key=padding.__getitem__, default=None)


def splits_of(outputs: int, steps: int) -> int:
    """Into how many splits the inputs of a matrix are divided: a power of two, by its shape alone."""
    splits, blocks = 1, -(-outputs // BLOCK)
    while blocks * splits < _PROGRAMS and steps >= 2 * splits * _LEAST_STEPS:
        splits *= 2
    return splits


def tiles_of(outputs: int) -> int:
    """Most tiles of a launch whose splits are apart."""
    return max(
        -(-outputs // shape.outputs) * -(-rows // shape.rows)
        for rows in (1, _MOST_APART)
        for shape in (launch_shape(rows),)
    )


def counters_for(outputs: int, device: torch.device) -> torch.Tensor:
    """Zeros for all tiles of the launches whose splits are apart, int32."""
    return torch.zeros(tiles_of(outputs), dtype=torch.int32, device=device)


def added_by_widening(values: Values) -> float:
    """What the product's widening adds to each value, and `Words.zero` takes away."""
    return -16.0 if values is Values.INTEGERS4 else 0.0


def pack_words(values: torch.Tensor, bits: int, chunk: int) -> torch.Tensor:
    """uint8 `[outputs, inputs]` of values of 4 or 8 bits → int32 `[blocks, steps, BLOCK, chunk]`, padded with zeros."""
    each = 32 // bits
    outputs, inputs = values.shape
    padded = torch.nn.functional.pad(values, (0, -inputs % (each * chunk), 0, -outputs % BLOCK))
    chunks = padded.view(-1, BLOCK, padded.shape[1] // (each * chunk), each, chunk)
    low, high = chunks[:, :, :, ::2], chunks[:, :, :, 1::2]
    if bits == 4:
        low, high = (half[:, :, :, ::2] | half[:, :, :, 1::2] << 4 for half in (low, high))
    held = torch.cat([low, high], dim=3).permute(0, 2, 1, 4, 3).contiguous()  # [blocks, steps, BLOCK, chunk, 4]
    return held.view(torch.int32).squeeze(-1)
