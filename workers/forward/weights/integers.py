"""Builds groups from packed unsigned integers, scales and zero points, as AWQ, GPTQ and compressed-tensors store them.

Integers lie in 32-bit words, the first in the lowest bits; those of 3 bits may lie in two words. Integers of 2 and 3
bits are held in 4.
"""

from __future__ import annotations

from math import gcd

import torch

from workers.forward.weights.base import Offset
from workers.forward.weights.groups import GroupStorage, pairs

BITS = (2, 3, 4, 8)
"""Bits of an integer that are read."""
_WORD = 8
"""Inputs of a group in 4 bits are a multiple of this, as the kernels read them."""


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 `[rows, n]` → integers uint8 `[rows, n * 32 / bits]`. For 3 bits, `n` is a multiple of 3."""
    if bits == 3:
        return _unpacked_across_words(words)
    held = words.contiguous().view(torch.uint8)
    if bits == 8:
        return held
    return torch.stack([(held >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=2).flatten(1)


def _unpacked_across_words(words: torch.Tensor) -> torch.Tensor:
    """Words int32 `[rows, n]` of integers of 3 bits, 32 in three words → uint8 `[rows, n * 32 / 3]`."""
    threes = (words.reshape(len(words), -1, 3).long() & 0xFFFFFFFF).unbind(dim=2)
    found = []
    for bit in range(0, 96, 3):
        at, shift = divmod(bit, 32)
        value = threes[at] >> shift
        if shift > 29:
            value = value | threes[at + 1] << (32 - shift)
        found.append((value & 7).to(torch.uint8))
    return torch.stack(found, dim=2).flatten(1)


def group_storage(
    words: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor,
) -> GroupStorage:
    """Groups from words `[out, n]` that are packed along the inputs, and from what each group has.

    `scales` and `zeros` are `[out, groups]`. A weight is scale * (integer - zero); without zeros, the zero is in the
    middle. `group_of` `[in]` is the group of each input. Raises `ValueError` for groups that the kernels do not read.
    """
    inputs = len(group_of)
    if bits == 4 and not inputs % 2:
        return groups_of_pairs(words.contiguous().view(torch.uint8)[:, : inputs // 2], scales, zeros, group_of)
    return groups_of_integers(unpacked(words, bits)[:, :inputs], bits, scales, zeros, group_of)


def groups_of_integers(
    integers: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor,
) -> GroupStorage:
    """Groups from integers uint8 `[out, in]`; the other arguments are those of `group_storage`."""
    if bits < 8 and integers.shape[1] % 2:
        raise ValueError(f"{integers.shape[1]} inputs in {bits} bits are refused; their number must be even")
    return _grouped(_held(integers, bits), bits, scales, zeros, group_of)


def groups_of_pairs(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_of: torch.Tensor
) -> GroupStorage:
    """Groups from integers of 4 bits, two in a byte, uint8 `[out, in / 2]`: input 2 i is in the low half of byte i."""
    return _grouped(values, 4, scales, zeros, group_of)


def groups_in_order(inputs: int, groups: int) -> torch.Tensor:
    """The group of each input, int64 `[in]`: groups of one size, of which the last may have fewer."""
    return torch.arange(inputs) // -(-inputs // groups)


def equal_groups(group_of: torch.Tensor, groups: int, bits: int) -> torch.Tensor | None:
    """Into how many groups of one size each group must be divided, int64 `[groups]`; `None` if they have one size.

    Raises `ValueError` for sizes that the kernels do not read.
    """
    counts = torch.bincount(group_of, minlength=groups)
    size = gcd(*counts.tolist())
    if bits < 8 and size % _WORD and size < len(group_of):
        raise ValueError(
            f"groups of {sorted(set(counts.tolist()))[:4]} inputs in {bits} bits are refused; "
            f"their sizes must be multiples of {_WORD}"
        )
    return None if bool((counts == size).all()) else counts // size


def _held(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers uint8 `[out, in]` as `GroupStorage` holds them: those of 8 bits less 128."""
    return (integers ^ 128).view(torch.int8) if bits == 8 else pairs(integers)


def _grouped(
    values: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group_of: torch.Tensor
) -> GroupStorage:
    """Groups of one size, in activation order if inputs of a group are not neighbours. `values`: see `_held`."""
    repeats = equal_groups(group_of, scales.shape[1], bits)
    order = None if bool((group_of.diff() >= 0).all()) else group_of.argsort(stable=True)
    held, middle = (4, 0.0) if bits < 8 else (8, 128.0)
    if order is not None:
        whole = GroupStorage(values, scales[:, :1], held).integers().view(torch.uint8)[:, order]
        values = pairs(whole) if held == 4 else whole.contiguous().view(torch.int8)
    zero, offsets = float(1 << (bits - 1)) - middle, None
    if zeros is not None:
        shifted = zeros.float() - middle
        zero = float(shifted.flatten()[0])
        offsets = None if bool((shifted == zero).all()) else shifted.to(scales.dtype)
    if repeats is not None:
        scales = scales.repeat_interleave(repeats, dim=1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, dim=1)
    kind, zero = (Offset.NONE, zero) if offsets is None else (Offset.ZERO, 0.0)
    scales = scales.clone(memory_format=torch.contiguous_format)  # not a part of a mapped file
    return GroupStorage(values, scales, held, kind, offsets, zero, order)
