"""The structures that the paged attention kernel for CPU reads: a step, and one layer's attention (attention.h)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.forward.layout import RowShape, slots_of, source_of
from workers.kv.groups import KvCacheGroups

MOST_VECTORS = 64  # query heads per KV head, as in attention.c
MOST_DIM = 256  # head dimension, as in attention.c
MOST_LATENT = 576  # dimension of a key that holds its value, as in attention.c
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 11}
_BEYOND = np.iinfo(np.int32).max
"""Stored length of rows that have no tree."""


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
        ("latent", ctypes.c_int64),
        ("slopes", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """A step's rows as the kernel reads them. `header` points into `arrays`."""

    header: StepHeader
    arrays: tuple[array[int] | npt.NDArray[np.generic], ...]
    end: int
    """Length of the longest row after this step."""
    reads_sources: bool = False
    """Whether the rows are sources, of which every token sees the whole, whatever a layer's window is."""


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


def build_native_source_step(rows: Sequence[RowShape], kv_groups: KvCacheGroups) -> NativeStep:
    """Build the structure that the CPU kernel reads, as `build_native_step` does."""
    size, tables = kv_groups.layout.block_size, kv_groups.layout.tables
    sources = [source_of(row, tables) for row in rows]
    used = [-(-source.length // size) for source in sources]
    most_blocks = max(used)
    blocks, position = array("i"), array("i")
    first_token = array("i", [0])
    for table in range(tables):
        for source, count in zip(sources, used, strict=True):
            blocks.extend(source.blocks[table][:count])
            blocks.extend([-1] * (most_blocks - count))
    for row, source in zip(rows, sources, strict=True):
        # A token at the last position of the source sees all of it. The kernel stores no keys and values for 0 tokens.
        position.extend([source.length - 1] * row.width)
        first_token.append(len(position))
    nothing = array("q", [0])
    ends = array("i", [_BEYOND]) * len(rows)
    arrays = (blocks, nothing, first_token, ends, ends, position, nothing)
    header = StepHeader(len(rows), 0, size, most_blocks, 0, *map(address, arrays))
    return NativeStep(header, arrays, max([source.length for source in sources]), reads_sources=True)


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
