"""A packed decoder as memory regions and JSON, with offsets instead of addresses, and back again."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from workers.forward.native.decoder import PackedDecoder
from workers.forward.native.decoder_shape import DecoderShape
from workers.forward.native.structures import GATE_UP_PARTS, QKV_PARTS, DecoderLayer, Matrix
from workers.model.packed_weights.region_file import padded_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MATRICES = ("out", "down")
_PARTS = {"qkv": QKV_PARTS, "gate_up": GATE_UP_PARTS}
"""What a layer has as one matrix or as several, and the most of them."""
_NORMS = ("input_norm", "post_norm", "query_norm", "key_norm")
_MATRIX_NUMBERS = (
    *("kind", "inputs", "outputs", "blocks", "group", "scale_kind", "offset", "super", "planes", "less", "zero"),
)
_MATRIX_ADDRESSES = ("weights", "scale", "bias", "order", "table")
_COMPARED_POSITIONS = 4096
"""Positions whose angles are compared at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class RotaryAngles:
    """Rotary angles from constant frequencies: what the modules of `transformers` compute, without these modules."""

    frequencies: torch.Tensor
    """float32 `[dim / 2]`, in radians per position."""
    scaling: float
    """Factor of cosines and sines."""

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(like.dtype), sin.to(like.dtype)


def plain_angles(rotary: Any, context_len: int) -> RotaryAngles | None:
    """Return rotary angles that equal those of the module `rotary`, bit for bit, at all positions below `context_len`.

    Returns `None` if any of them differs.
    """
    frequencies = getattr(rotary, "inv_freq", None)
    if not isinstance(frequencies, torch.Tensor):
        return None
    found = RotaryAngles(frequencies.detach().float().clone(), float(getattr(rotary, "attention_scaling", 1.0)))
    like = torch.empty(1)
    for first in range(0, context_len, _COMPARED_POSITIONS):
        positions = torch.arange(first, min(context_len, first + _COMPARED_POSITIONS))[None]
        pairs = zip(found(like, positions), rotary(like, positions), strict=True)
        if not all(torch.equal(own, expected) for own, expected in pairs):
            return None
    return found


def to_regions(packed: PackedDecoder, angles: RotaryAngles) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a packed decoder, with its rotary angles, as JSON content and memory regions."""
    embedding = packed.embedding
    regions = [*packed.memory, angles.frequencies, *([] if embedding is None else [embedding])]
    offsets = _Offsets(regions)
    content = {
        "shape": asdict(packed.shape),
        "dtype": _name(packed.dtype),
        "tokens": packed.tokens,
        "vocabulary": packed.vocabulary,
        "layers": [
            {
                **{name: [offsets.of_matrix(one) for one in getattr(layer, name) if one.outputs] for name in _PARTS},
                **{name: offsets.of_matrix(getattr(layer, name)) for name in _MATRICES},
                **{name: offsets.of(getattr(layer, name)) for name in _NORMS},
            }
            for layer in packed.layers
        ],
        "final_norm": offsets.of(packed.final_norm),
        "head": offsets.of_matrix(packed.head),
        "frequencies": offsets.of(angles.frequencies.data_ptr()),
        "scaling": angles.scaling,
        "table": None if packed.table is None else offsets.of_matrix(packed.table),
        "embedding": None if embedding is None else [offsets.of(embedding.data_ptr()), _name(embedding.dtype)],
    }
    return content, regions


def from_regions(content: dict[str, Any], memory: torch.Tensor) -> PackedDecoder:
    """Return the packed decoder whose regions lie one after another in `memory`, uint8 `[bytes]`.

    Raises `ValueError`, `KeyError`, `TypeError` for wrong content.
    """
    shape = DecoderShape(**content["shape"])
    places = _Places(memory)
    layers = (DecoderLayer * len(content["layers"]))()
    for layer, values in zip(layers, content["layers"], strict=True):
        for name, most in _PARTS.items():
            setattr(layer, name, (Matrix * most)(*map(places.matrix, values[name])))
        for name in _MATRICES:
            setattr(layer, name, places.matrix(values[name]))
        for name in _NORMS:
            setattr(layer, name, places.address(values[name]))
    final_norm = places.address(content["final_norm"])
    if final_norm is None:
        raise ValueError("there is no last norm")
    embedding = None
    if content["embedding"] is not None:
        offset, name = content["embedding"]
        embedding = places.tensor(offset, (content["tokens"], shape.hidden), DTYPES[name])
    frequencies = places.tensor(content["frequencies"], (shape.dim // 2,), torch.float32)
    return PackedDecoder(
        shape=shape,
        dtype=DTYPES[content["dtype"]],
        tokens=content["tokens"],
        vocabulary=content["vocabulary"],
        layers=layers,
        final_norm=final_norm,
        head=places.matrix(content["head"]),
        embedding=embedding,
        table=None if content["table"] is None else places.matrix(content["table"]),
        rotary=RotaryAngles(frequencies, content["scaling"]),
        memory=(memory,),
    )


class _Offsets:
    """Turns addresses in memory regions into offsets in a file of these regions."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        offset, found = 0, []
        for region in regions:
            found.append((region.data_ptr(), region.nbytes, offset))
            offset += padded_size(region.nbytes)
        self._regions = sorted(found)
        self._addresses = [address for address, _, _ in self._regions]

    def of(self, address: int | None) -> int | None:
        if address is None:
            return None
        first, size, offset = self._regions[bisect_right(self._addresses, address) - 1]
        if not first <= address < first + size:
            raise ValueError("an address lies in no region")
        return offset + address - first

    def of_matrix(self, matrix: Matrix) -> dict[str, int | float | None]:
        return {
            **{name: getattr(matrix, name) for name in _MATRIX_NUMBERS},
            **{name: self.of(getattr(matrix, name)) for name in _MATRIX_ADDRESSES},
        }


class _Places:
    """Turns offsets in a file of regions into addresses and tensors in the memory that holds them."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def address(self, offset: int | None) -> int | None:
        if offset is None:
            return None
        if not 0 <= offset < len(self._memory) or offset % ctypes.sizeof(ctypes.c_float):
            raise ValueError(f"offset {offset} lies outside of the {len(self._memory)} bytes")
        return self._memory.data_ptr() + offset

    def matrix(self, values: dict[str, Any]) -> Matrix:
        numbers = {name: values[name] for name in _MATRIX_NUMBERS}
        return Matrix(**numbers, **{name: self.address(values[name]) for name in _MATRIX_ADDRESSES})

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).view(shape)


def _name(dtype: torch.dtype) -> str:
    return next(name for name, found in DTYPES.items() if found is dtype)
