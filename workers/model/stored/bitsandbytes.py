"""bitsandbytes checkpoints: NF4 and FP4 in blocks of the flattened matrix, and int8 per output.

4 bits: `weight` uint8 `[out * in / 2, 1]`, the first value of a byte in its high half; `weight.quant_map` float32
`[16]`, the numbers that values choose from; `weight.absmax`, a scale for each block, float32 `[blocks]`, or uint8 with
scales of their own (`weight.nested_absmax`, `weight.nested_quant_map`); `weight.quant_state.bitsandbytes__nf4`, JSON.
8 bits: `weight` int8 `[out, in]` and `SCB` float32 `[out]`, 127 times the scales.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.int8 import Int8Storage
from workers.model.stored.parts import Parts, Region, own_groups, two_sizes

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_LARGEST = 127.0
_BY_ROWS = 0
"""The order of a matrix's numbers that is read. Earlier versions also wrote those of the tiles of some GPUs."""
_MOST_STATE_BYTES = 4096


class BitsAndBytes:
    """The format of one checkpoint."""

    parts = frozenset(
        {"weight", "weight.quant_map", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", *_STATES}
    ) | {"SCB", "weight_format"}
    scales = ("weight.absmax", "SCB")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises `ValueError` for settings that are not read."""
        if not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
            raise ValueError("load_in_4bit and load_in_8bit are false; one must be true")
        storage = settings.get("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            raise ValueError(f"bnb_4bit_quant_storage is {storage!r}; it must be uint8")

    def is_quantized(self, names: Collection[str]) -> bool:
        """Whether a layer has scales."""
        return "weight" in names and any(scale in names for scale in self.scales)

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs of the matrix."""
        given = [*parts.get("weight").shape] if "SCB" in parts else _state(parts).get("shape")
        return two_sizes("the weight's shape", given)

    def storage(self, parts: Parts, region: Region) -> Storage:
        """A region of a matrix."""
        shape = self.shape(parts)
        if "SCB" in parts:
            order = int(parts.get("weight_format").flatten()[0]) if "weight_format" in parts else _BY_ROWS
            if order != _BY_ROWS:
                raise ValueError(f"weight_format is {order}; it must be {_BY_ROWS}, whose numbers lie row by row")
            integers = parts.checked("weight", (torch.int8,), shape)[region.outputs, region.inputs].clone()
            scales = parts.checked("SCB", (torch.float32,), shape[:1])[region.outputs]
            return Int8Storage(integers, scales / _LARGEST)
        state = _state(parts)
        block = _positive(state, "blocksize")
        if shape[1] % block or block % 8:
            raise ValueError(f"{shape[1]} inputs are no whole blocks of {block}, or these are no multiple of 8")
        columns = own_groups(region.inputs, shape[1], block)
        packed = parts.checked("weight", (torch.uint8,), (prod(shape) // 2, 1)).view(shape[0], -1)
        own = packed[region.outputs, region.inputs.start // 2 : region.inputs.stop // 2]
        scales = _scales(parts, state, prod(shape) // block).view(shape[0], -1)
        table = parts.checked("weight.quant_map", (torch.float32,), (16,)).clone()
        return GroupStorage(own >> 4 | own << 4, scales[region.outputs, columns].clone(), 4, table=table)


def _state(parts: Parts) -> Mapping[str, Any]:
    """What a matrix says about its blocks. Raises `ValueError`."""
    for name in _STATES:
        if name in parts:
            given = parts.get(name)
            parts.checked(name, (torch.uint8,), (min(len(given.flatten()), _MOST_STATE_BYTES),))
            found = json.loads(bytes(given.tolist()))
            if isinstance(found, dict):
                return found
            raise ValueError(f"{name} is no JSON object")
    raise ValueError(f"{_STATES[0]} is missing")


def _positive(state: Mapping[str, Any], field: str) -> int:
    found = state.get(field)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"{field} is {found!r}; it must be at least 1")
    return found


def _scales(parts: Parts, state: Mapping[str, Any], blocks: int) -> torch.Tensor:
    """The scale of each block, float32 `[blocks]`."""
    if "weight.nested_absmax" not in parts:
        return parts.checked("weight.absmax", (torch.float32,), (blocks,))
    size, offset = _positive(state, "nested_blocksize"), state.get("nested_offset")
    if not isinstance(offset, float):
        raise ValueError(f"nested_offset is {offset!r}; it must be a number")  # noqa: TRY004 - of a file
    steps = parts.checked("weight.absmax", (torch.uint8,), (blocks,))
    numbers = parts.checked("weight.nested_quant_map", (torch.float32,), (256,))
    largest = parts.checked("weight.nested_absmax", (torch.float32,), (-(-blocks // size),))
    return numbers[steps.int()] * largest[torch.arange(blocks) // size] + offset
