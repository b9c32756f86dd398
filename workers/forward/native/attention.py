"""The paged attention kernel for CPU, and the step structure that it reads. See attention.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.forward.layout import RowShape, slots_of
from workers.forward.native.build import load_library
from workers.kv.groups import KvCacheGroups, LayerPlacement
from workers.kv.spec import KvCacheSpec

_NAMES = {torch.bfloat16: "pilotfish_attend_bfloat16", torch.float32: "pilotfish_attend_float32"}
MOST_VECTORS = 64  # query heads per KV head, as in attention.c
MOST_DIM = 256  # head dimension, as in attention.c
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class StepHeader(ctypes.Structure):
    """The C structure of a step. See attention.h for its fields."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "block_size", "most_blocks", "most_depth")),
        *(
            (name, ctypes.c_void_p)
            for name in ("blocks", "slots", "first_token", "stored_len", "base_len", "position", "path")
        ),
    ]


class LayerHeader(ctypes.Structure):
    """The C structure of one layer's attention. See attention.h for its fields."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "keys", "values")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("query", "key", "value") for axis in ("head", "token")),
        *(
            (name, ctypes.c_int64)
            for name in ("query_kind", "output_kind", "heads", "kv_heads", "dim", "table", "window", "sinks")
        ),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """A step's rows as the kernel reads them. `header` points into `arrays`."""

    header: StepHeader
    arrays: tuple[array[int] | npt.NDArray[np.generic], ...]
    end: int
    """Length of the longest row after this step."""


class Kernel:
    """Attention over the blocks of a pool of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._attend = library[_NAMES[dtype]]
        self._attend.argtypes = [ctypes.POINTER(StepHeader), ctypes.POINTER(LayerHeader)]
        self._attend.restype = None

    def attend(
        self,
        step: NativeStep,
        placement: LayerPlacement,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, dim]
        value: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],  # [blocks, block_size, kv_heads, dim]
        scale: float,
    ) -> torch.Tensor:
        """Store the new keys and values, then attend. Returns `[1, tokens, heads, dim]`."""
        query, key, value = (_dense(tensor) for tensor in (query, key, value))
        _, heads, tokens, dim = query.shape
        output = torch.empty((1, tokens, heads, dim), dtype=query.dtype)
        layer = LayerHeader(
            *(tensor.data_ptr() for tensor in (query, key, value, output, *pool)),
            *(stride for tensor in (query, key, value) for stride in tensor.stride()[1:3]),
            KINDS[query.dtype],
            KINDS[output.dtype],
            heads,
            key.shape[1],
            dim,
            placement.table,
            placement.window.size or 0,
            placement.window.sinks,
            scale,
        )
        self._attend(ctypes.byref(step.header), ctypes.byref(layer))
        return output


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if each head's numbers are contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def build_native_step(rows: Sequence[RowShape], kv_groups: KvCacheGroups) -> NativeStep:
    """Build the kernel's step structure. The tokens of the step are the rows' tokens, one row after another.

    Lists and arrays of the standard library: for the few numbers of a decoding step they take less time than numpy.
    """
    size, tables = kv_groups.layout.block_size, kv_groups.layout.tables
    ends = [row.end for row in rows]
    most_blocks, depths = -(-max(ends) // size), max([row.tree.depth() for row in rows])
    blocks, slots = array("i"), array("q")
    padding = [-1] * most_blocks
    for table in range(tables):
        for row, end in zip(rows, ends, strict=True):
            held, used = row.blocks[table], -(-end // size)
            blocks.extend(held[:used])
            blocks.extend(padding[used:])
            slots.extend(slots_of(held, row.stored_len, end, size))
    first_token, position = array("i", [0]), array("i")
    for row, end in zip(rows, ends, strict=True):
        position.extend(range(row.stored_len, end) if row.tree.is_chain else row.positions())
        first_token.append(len(position))
    arrays = (
        *(blocks, slots, first_token),
        array("i", [row.stored_len for row in rows]),
        array("i", [row.base_len for row in rows]),
        *(position, _paths(rows, first_token, depths)),
    )
    header = StepHeader(len(rows), len(position), size, most_blocks, depths, *map(address, arrays))
    return NativeStep(header, arrays, max(ends))


def address(numbers: array[int]) -> int:
    """Where the numbers lie in memory, as long as the array exists and does not grow."""
    return numbers.buffer_info()[0]


def _paths(rows: Sequence[RowShape], first_token: Sequence[int], depths: int) -> array[int]:
    """For each node, the path from the root to the node itself, `[tokens, depths]`; zeros after it and elsewhere."""
    paths = array("i", bytes(4 * first_token[-1] * depths))
    for row, first in zip(rows, first_token, strict=False):
        found: list[list[int]] = []
        for node, parent in enumerate(row.tree.parents):
            found.append([*(found[parent] if parent >= 0 else ()), node])
            begin = (first + row.fresh + node) * depths
            paths[begin : begin + len(found[node])] = array("i", found[node])
    return paths


def load_kernel(spec: KvCacheSpec, directory: str | None) -> Kernel | None:
    """Load the kernel for a model on CPU. Returns `None` if it does not support the model or no compiler is found.

    `directory` keeps the built library between starts.
    """
    if spec.device.type != "cpu" or spec.dtype not in _NAMES:
        return None
    if any(shape.head_dim > MOST_DIM or shape.heads_per_kv > MOST_VECTORS for shape in spec.layers):
        return None
    library = load_library(directory)
    return None if library is None else Kernel(library, spec.dtype)
