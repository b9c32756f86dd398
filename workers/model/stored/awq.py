"""AWQ checkpoints: 4 bits with zero points, packed along the outputs in an interleaved order.

`qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]`, `scales` `[groups, out]`, as AutoAWQ writes them in
its version `gemm`. A weight is scale * (integer - zero).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.integers import groups_of_pairs, unpacked
from workers.model.stored.parts import FLOATS, Parts, Region, group_size, groups, integer, own_groups

_BITS, _EACH = 4, 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight outputs lies in each of its four bits, from the lowest on."""


class Awq:
    """The format of one checkpoint."""

    parts = frozenset({"qweight", "qzeros", "scales"})
    scales = ("scales",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises `ValueError` for settings that are not read."""
        integer(settings, "bits", (_BITS,))
        self._size = group_size(settings)
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(f"version is {version!r}; it must be gemm")
        if settings.get("zero_point", True) is not True:
            raise ValueError("zero_point is false; it must be true")

    def is_quantized(self, names: Collection[str]) -> bool:
        """Whether a layer has packed weights."""
        return "qweight" in names

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs of the matrix."""
        inputs, words = _two(parts, "qweight")
        return words * _EACH, inputs

    def storage(self, parts: Parts, region: Region) -> Storage:
        """A region of a matrix."""
        outputs, inputs = self.shape(parts)
        count, size = groups(inputs, self._size), inputs if self._size == -1 else self._size
        if size % 2:
            raise ValueError(f"groups of {size} inputs are refused; their size must be even")
        own = own_groups(region.inputs, inputs, size)
        weights = parts.checked("qweight", (torch.int32,), (inputs, outputs // _EACH))
        zeros = parts.checked("qzeros", (torch.int32,), (count, outputs // _EACH))
        scales = parts.checked("scales", FLOATS, (count, outputs))
        return groups_of_pairs(
            _pairs(weights[region.inputs], region.outputs),
            scales[own, region.outputs].t(),
            _integers(zeros[own], region.outputs),
            (torch.arange(inputs) // size)[region.inputs] - own.start,
        )


def _words(outputs: slice) -> tuple[slice, slice]:
    """The words of some outputs, and where these are among the outputs of the words."""
    first, last = outputs.start // _EACH, -(-outputs.stop // _EACH)
    return slice(first, last), slice(outputs.start - first * _EACH, outputs.stop - first * _EACH)


def _integers(words: torch.Tensor, outputs: slice) -> torch.Tensor:
    """Words `[n, out / 8]` → integers of some outputs, uint8 `[outputs, n]`."""
    held, of_words = _words(outputs)
    order = torch.tensor(_ORDER).argsort()
    integers = unpacked(words[:, held], _BITS).view(len(words), -1, _EACH)[..., order].flatten(1)
    return integers[:, of_words].t()


def _pairs(words: torch.Tensor, outputs: slice) -> torch.Tensor:
    """Words `[in, out / 8]` → integers of some outputs, two neighbouring inputs in one byte, `[outputs, in / 2]`."""
    held, of_words = _words(outputs)
    values = words[:, held].contiguous().view(torch.uint8)  # [in, bytes of words]
    first, second = values[::2], values[1::2]
    pairs = torch.empty(values.shape[1] // 4, _EACH, len(first), dtype=torch.uint8)
    halves = (first & 15) | second << 4, first >> 4 | (second & 0xF0)
    for place, output in enumerate(_ORDER):
        pairs[:, output] = halves[place % 2][:, place // 2 :: 4].t()
    return pairs.view(-1, len(first))[of_words]


def _two(parts: Parts, part: str) -> tuple[int, int]:
    """The two sizes of a matrix. Raises `ValueError`."""
    shape = parts.get(part).shape
    if len(shape) != 2:
        raise ValueError(f"{part} is {[*shape]}; it must have two dimensions")
    return int(shape[0]), int(shape[1])
