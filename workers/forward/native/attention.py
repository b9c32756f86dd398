"""The paged attention kernel for CPU, and the step structure that it reads. See attention.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.forward.layout import RowShape
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
    arrays: tuple[npt.NDArray[np.generic], ...]
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
    """Build the kernel's step structure. The tokens of the step are the rows' tokens, one row after another."""
    layout = kv_groups.layout
    size, tables = layout.block_size, layout.tables
    most_blocks = max(-(-row.end // size) for row in rows)
    blocks = np.full((tables, len(rows), most_blocks), -1, dtype=np.int32)
    first_token = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([row.width for row in rows], out=first_token[1:])
    tokens = int(first_token[-1])
    slots = np.empty((tables, tokens), dtype=np.int64)
    position = np.empty(tokens, dtype=np.int32)
    depths = max(row.tree.depth() for row in rows)
    path = np.zeros((tokens, depths), dtype=np.int32)
    for index, row in enumerate(rows):
        first, end = int(first_token[index]), int(first_token[index + 1])
        used = -(-row.end // size)
        stored = np.arange(row.stored_len, row.end)
        for table in range(tables):
            held = np.array(row.blocks[table][:used], dtype=np.int32)
            blocks[table, index, :used] = held
            slots[table, first:end] = held[stored // size].astype(np.int64) * size + stored % size
        if not row.tree:
            position[first:end] = stored
            continue
        position[first:end] = row.positions()
        for node, line in enumerate(_paths(row)):
            path[first + row.fresh + node, : len(line)] = line
    stored_len = np.array([row.stored_len for row in rows], dtype=np.int32)
    base_len = np.array([row.base_len for row in rows], dtype=np.int32)
    arrays = (blocks, slots, first_token, stored_len, base_len, position, path)
    header = StepHeader(len(rows), tokens, size, most_blocks, depths, *(array.ctypes.data for array in arrays))
    return NativeStep(header, arrays, max(row.end for row in rows))


def _paths(row: RowShape) -> list[list[int]]:
    """For each node, the path from the root to the node itself."""
    paths: list[list[int]] = []
    for node, parent in enumerate(row.tree.parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
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
