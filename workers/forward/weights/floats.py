"""Builds groups of 8-bit floats (E4M3), as FP8 checkpoints store them, and of 4-bit floats (MXFP4)."""

from __future__ import annotations

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.groups import E2M1, GroupStorage
from workers.forward.weights.integers import equal_groups

_NOT_A_NUMBER = 0x7F
_NO_EXPONENT = 255
_BIAS = 127


def e4m3_storage(weight: torch.Tensor, scales: torch.Tensor, group_of: torch.Tensor) -> GroupStorage:
    """Groups from float8_e4m3fn `[out, in]`, scales `[out, groups]`, and the group of each input `[in]`, ascending.

    Raises `ValueError` for a weight that is not a number.
    """
    values = weight.contiguous().view(torch.uint8).clone()
    if bool(((values & _NOT_A_NUMBER) == _NOT_A_NUMBER).any()):
        raise ValueError("weight has values that are not numbers")
    repeats = equal_groups(group_of, scales.shape[1], 8)
    own = scales if repeats is None else scales.repeat_interleave(repeats, dim=1)
    own = own.float() if own.dtype is torch.float16 else own
    return GroupStorage(values, own.contiguous().clone(), 8)


def mxfp4_storage(blocks: torch.Tensor, exponents: torch.Tensor) -> GroupStorage:
    """Groups from blocks uint8 `[out, groups, 16]` of 32 values of 4 bits (E2M1) and exponents uint8 `[out, groups]`.

    The first value of a byte is in its low half. A block's scale is 2 to its exponent less 127. Raises `ValueError` for
    a scale that is not a number.
    """
    if bool((exponents == _NO_EXPONENT).any()):
        raise ValueError("scales are not numbers")
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS).bfloat16()
    table = torch.tensor(E2M1)
    return GroupStorage(blocks.flatten(1).clone(), scales, 4, table=table)


def mxfp4_parts(storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """Values uint8 `[out, in / 2]` and powers of two int8 `[out, in / 32]` of a matrix in MXFP4.

    Two neighbouring inputs are in a byte. Raises `ValueError` for another storage.
    """
    if isinstance(storage, GroupStorage) and storage.bits == 4 and storage.group == 32 and storage.table is not None:
        mantissa, exponent = torch.frexp(storage.scale.float())
        table = torch.tensor(E2M1)
        has_more = storage.order is not None or storage.offsets is not None
        if torch.equal(storage.table.cpu(), table) and bool((mantissa == 0.5).all()) and not has_more:
            return storage.values, (exponent - 1).to(torch.int8)
    raise ValueError("experts are not stored in MXFP4")
