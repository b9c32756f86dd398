"""What a format of quantized weights reads: the tensors that stand for one matrix, and the region that a rank keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workers.forward.weights.base import CutRefused, NoGpuProduct, Storage

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Types of scales."""
WORD_INTEGERS = 32
"""Integers that take whole 32-bit words, whatever their bits."""


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a matrix `[out, in]`. Slices have a start and a stop, and no step."""

    outputs: slice
    inputs: slice

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        """All of a matrix of this shape."""
        return Region(slice(0, shape[0]), slice(0, shape[1]))


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one matrix by the last word of their names. They are mapped: only what is sliced is read."""

    module: str
    """The layer's name, as `model.layers.0.mlp.up_proj`."""
    tensors: Mapping[str, torch.Tensor]

    def __contains__(self, part: str) -> bool:
        return part in self.tensors

    def get(self, part: str) -> torch.Tensor:
        """A tensor whose shape and type are not known to be right. Raises `ValueError` if there is none."""
        found = self.tensors.get(part)
        if found is None:
            raise ValueError(f"{part} is missing")
        return found

    def checked(self, part: str, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> torch.Tensor:
        """A tensor of one of these types and of this shape. Raises `ValueError` for another."""
        found = self.get(part)
        if found.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{part} is {str(found.dtype).removeprefix('torch.')}; it must be {names}")
        if tuple(found.shape) != tuple(shape):
            raise ValueError(f"{part} is {[*found.shape]}; it must be {[*shape]}")
        return found


class QuantizedFormat(Protocol):
    """How the checkpoints of one method store matrices. One is made from the settings of a checkpoint."""

    @property
    def parts(self) -> frozenset[str]:
        """The last words of the names of a matrix's tensors."""

    @property
    def scales(self) -> tuple[str, ...]:
        """Those of these that have the scales; a matrix has one of them."""

    def is_quantized(self, names: Collection[str]) -> bool:
        """Whether a layer's matrix is stored quantized: `names` are the last words of its tensors' names."""

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs of the matrix. Raises `ValueError`."""

    def storage(self, parts: Parts, region: Region) -> Storage:
        """A region of a matrix as it is stored. Raises `ValueError`, and `CutRefused` if the region cuts a group."""


def integer(settings: Mapping[str, Any], field: str, allowed: Sequence[int]) -> int:
    """A number of a checkpoint's settings. Raises `ValueError` unless it is one of `allowed`."""
    found = settings.get(field)
    if isinstance(found, bool) or not isinstance(found, int) or found not in allowed:
        raise ValueError(f"{field} is {found!r}; it must be {' or '.join(map(str, allowed))}")
    return found


def group_size(settings: Mapping[str, Any]) -> int:
    """Inputs of a group in a checkpoint's settings; −1 for one group of all. Raises `ValueError`."""
    found = settings.get("group_size", -1)
    if isinstance(found, bool) or not isinstance(found, int) or (found < 1 and found != -1):
        raise ValueError(f"group_size is {found!r}; it must be -1 or at least 1")
    return found


def groups(inputs: int, size: int) -> int:
    """Groups of `inputs` inputs. The last one may have fewer."""
    return 1 if size == -1 else -(-inputs // size)


def own_groups(inputs: slice, of: int, size: int) -> slice:
    """The groups of some of `of` inputs. Raises `CutRefused` unless these are whole groups of `size` inputs."""
    if inputs.start % size or (inputs.stop % size and inputs.stop != of):
        raise CutRefused(f"inputs {inputs.start} to {inputs.stop} cut groups of {size} inputs into parts")
    return slice(inputs.start // size, -(-inputs.stop // size))


def two_sizes(what: str, given: object) -> tuple[int, int]:
    """The two sizes of a matrix. Raises `ValueError` for anything but two whole numbers of at least 1."""
    sizes = given if isinstance(given, list) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"{what} is {given}; it must have two sizes of at least 1")
    return int(sizes[0]), int(sizes[1])


def scales_of(parts: Parts, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """The scales `[out, groups]` of a matrix of this shape, which are stored so, one per output, or one for all.

    Raises `ValueError`.
    """
    scales, (outputs, inputs) = parts.get(name), shape
    if scales.numel() == 1:
        return parts.checked(name, FLOATS, scales.shape).reshape(1, 1).expand(outputs, 1)
    if scales.dim() == 1:
        return parts.checked(name, FLOATS, (outputs,))[:, None]
    count = int(scales.shape[-1])
    if not 1 <= count <= inputs:
        raise ValueError(f"{name} has {count} groups of {inputs} inputs; it must have 1 to {inputs}")
    return parts.checked(name, FLOATS, (outputs, count))


def words(span: slice, bits: int) -> tuple[slice, slice]:
    """The 32-bit words that hold a span of integers, and where the span lies among the integers of these words."""
    first = span.start // WORD_INTEGERS * WORD_INTEGERS
    last = -(-span.stop // WORD_INTEGERS) * WORD_INTEGERS
    return slice(first * bits // 32, last * bits // 32), slice(span.start - first, span.stop - first)


def nbytes_of(sample: Storage, outputs: int, *, on_gpu: bool = False) -> int:
    """Bytes of a matrix with so many outputs, from a few of them; `on_gpu`: as its product there reads it, if any."""
    try:
        return sample.nbytes_of(outputs, on_gpu=on_gpu)
    except NoGpuProduct:
        return sample.nbytes_of(outputs)
