"""What a format of quantized weights reads: the tensors that stand for one matrix, and the region that a rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workers.forward.weights.base import CutRefused, Storage, grows_if_joined

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Types of scales."""
WORD_INTEGERS = 32
"""Integers that take whole 32-bit words, whatever their bits."""


_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
)
"""Matrices of the same inputs, which are packed as one, by a word in their names in models and in GGUF files."""


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


def joined_sizes(sizes: Mapping[str, int], sample: Callable[[str], Storage]) -> dict[str, int]:
    """Bytes of matrices once those of the same inputs are packed as one, in place of the bytes of each alone.

    Gates and ups of different types become one in wider numbers, whose bytes count for the first of them; queries, keys
    and values become one only with plain numbers among them. `sample` returns a few outputs of the matrix of a name. It
    is asked for one layer of those with the same sizes.
    """
    found = dict(sizes)
    known: dict[tuple[int, ...], int] = {}
    for siblings in _JOINED:
        for name in [name for name in sizes if f".{siblings[0]}." in name]:
            names = [name.replace(f".{siblings[0]}.", f".{word}.") for word in siblings]
            if not name.endswith(".weight") or not all(one in sizes for one in names):
                continue
            alone = tuple(sizes[one] for one in names)
            if alone not in known:
                known[alone] = _packed_bytes([sample(one) for one in names], alone)
            found |= dict.fromkeys(names, 0) | {name: known[alone]}
    return found


def _packed_bytes(samples: Sequence[Storage], sizes: Sequence[int]) -> int:
    """Bytes of matrices once they are packed, from some outputs of each, and from the bytes of each alone."""
    is_gate_and_up = len(samples) == 2  # always one matrix
    if not is_gate_and_up and grows_if_joined(samples):
        return sum(sizes)
    joined = samples[0].joined(samples[1:])
    outputs = sum(size * one.outputs // one.nbytes for size, one in zip(sizes, samples, strict=True))
    return joined.nbytes * outputs // joined.outputs
