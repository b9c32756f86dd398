"""Reads matrices of GGUF files as they are stored: blocks of 32 inputs, or of 256 with scales of their own (k-quants).

The layouts are those of `ggml-quants.c` of llama.cpp, as the package `gguf` describes them. Numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from workers.forward.weights.base import Offset, Storage
from workers.forward.weights.block_quants import (
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    block_quant,
)
from workers.forward.weights.groups import GroupStorage, pairs
from workers.forward.weights.plain import PlainStorage

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PER_OUTPUT = (
    *("weight", "values", "scale", "offsets"),
    *("low", "high", "minimum", "scale_unit", "minimum_unit"),
)
"""The tensors of a storage that have a row for each output."""
_Blocks = torch.Tensor
"""uint8 `[out, blocks, bytes of a block]`."""


def gguf_storage(name: str, raw: torch.Tensor, dtype: torch.dtype | None = None) -> Storage:
    """The storage of a matrix of the type `name`, as `Q4_1`, from its bytes `[out, bytes]`.

    Plain numbers become those of `dtype`, if it is given, since torch multiplies equal types alone.

    Raises `ValueError` for a type that is not read.
    """
    if name in _PLAIN:
        return PlainStorage(raw.contiguous().view(_PLAIN[name]).to(dtype or _PLAIN[name]))
    if name not in _READERS:
        raise ValueError(f"type {name} is not read; it must be one of {', '.join((*_PLAIN, *_READERS))}")
    size, read = _READERS[name]
    return read(raw.reshape(len(raw), raw.shape[1] // size, size))


def joined_storage(parts: Iterable[Storage], outputs: int) -> Storage:
    """A matrix `[outputs, in]` from storages that `gguf_storage` made of its outputs, one after another.

    Memory holds one part beside the whole, and the whole is no view of larger tensors. Raises `ValueError` without
    parts.
    """
    whole: Any = None
    first = 0
    for part in parts:
        own = {name: values for name in _PER_OUTPUT if (values := getattr(part, name, None)) is not None}
        if whole is None:
            like: Any = part
            whole = replace(like, **{name: own[name].new_empty(outputs, *own[name].shape[1:]) for name in own})
        for name, values in own.items():
            getattr(whole, name)[first : first + part.outputs] = values
        first += part.outputs
    if whole is None:
        raise ValueError("there are no outputs")
    found: Storage = whole
    return found


def _split(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """`[out, blocks, n]` → `[out, blocks, *sizes]`."""
    return values.reshape(*values.shape[:2], *sizes)


def _halves(blocks: _Blocks, first: int) -> torch.Tensor:
    """The float16 number of each block at byte `first`, `[out, blocks]`."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).flatten(1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes `[…, n]` → values `[…, 2 n]`: the low halves of all bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _q4_0(blocks: _Blocks) -> Storage:
    return GroupStorage(pairs(_nibbles(blocks[..., 2:])), _halves(blocks, 0), 4, zero=8.0)


def _q4_1(blocks: _Blocks) -> Storage:
    values = pairs(_nibbles(blocks[..., 4:]))
    return GroupStorage(values, _halves(blocks, 0), 4, Offset.MINIMUM, _halves(blocks, 2))


def _fifth_bits(bits: torch.Tensor) -> torch.Tensor:
    """Bits `[…, 4]` bytes → values 0 or 16 `[…, 32]`."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((bits[..., None] >> shifts) & 1).flatten(-2) << 4


def _q5_0(blocks: _Blocks) -> Storage:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return block_quant(Q5_0, values.flatten(1), _halves(blocks, 0), None)


def _q5_1(blocks: _Blocks) -> Storage:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return block_quant(Q5_1, values.flatten(1), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: _Blocks) -> Storage:
    return GroupStorage(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0), 8)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes `[out, blocks, 12]` → eight scales and eight minima of 6 bits in each block, int8 `[out, groups]`."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=-1)
    return scales.flatten(1).view(torch.int8), minima.flatten(1).view(torch.int8)


def _q4_k(blocks: _Blocks) -> Storage:
    values = _nibbles(_split(blocks[..., 16:], 4, 32)).flatten(1)  # of [out, blocks, 4, 64]
    return block_quant(Q4_K, values, *_scales_and_minima(blocks[..., 4:16]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: _Blocks) -> Storage:
    values = _split(_nibbles(_split(blocks[..., 48:], 4, 32)), 8, 32)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # [out, blocks, 8, 32]
    values = (values | fifth << 4).flatten(1)
    return block_quant(Q5_K, values, *_scales_and_minima(blocks[..., 4:16]), _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: _Blocks) -> Storage:
    low = _nibbles(_split(blocks[..., :128], 2, 64))  # [out, blocks, 2, 128]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3  # [out, blocks, 2, 4, 32]
    values = (low | high.flatten(3) << 4).flatten(1)
    scales = blocks[..., 192:208].flatten(1).view(torch.int8)
    return block_quant(Q6_K, values, scales, None, _halves(blocks, 208))


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """64 bytes `[out, blocks, 64]` → values of 2 bits `[out, blocks, 2, 4, 32]`."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    values: torch.Tensor = (_split(packed, 2, 1, 32) >> shifts) & 3
    return values


def _q3_k(blocks: _Blocks) -> Storage:
    masks = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # [out, blocks, 8, 32]
    values = (_two_bits(blocks[..., 32:96]).flatten(2, 3) | masks << 2).flatten(1)
    low = torch.cat([blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4], dim=-1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((blocks[..., None, 104:108] >> shifts) & 3).flatten(2)
    scales = (low | high << 4).flatten(1).view(torch.int8) - 32
    return block_quant(Q3_K, values, scales, None, _halves(blocks, 108))


def _q2_k(blocks: _Blocks) -> Storage:
    values, scales = _two_bits(blocks[..., 16:80]).flatten(1), blocks[..., :16].flatten(1)
    return block_quant(Q2_K, values, scales, None, _halves(blocks, 80), _halves(blocks, 82))


_READERS: dict[str, tuple[int, Callable[[_Blocks], Storage]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what reads blocks, by the type's name."""
