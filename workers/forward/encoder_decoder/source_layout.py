"""The attention metadata of a step for cross-attention: which blocks hold the source of each row.

Every token of a row, nodes of its tree included, sees all tokens of the row's source, and stores nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from workers.forward.layout import RowGroup, RowShape, SourceShape, StepLayout
from workers.forward.native.attention import NativeStep, StepHeader, address
from workers.kv.groups import AttentionWindow, KvCacheGroups
from workers.kv.transfer import to_device

_EVERYTHING = AttentionWindow()
_BEYOND = np.iinfo(np.int32).max
"""Stored length of rows that have no tree."""


def build_source_layout(rows: Sequence[RowShape], kv_groups: KvCacheGroups, device: torch.device) -> StepLayout:
    """Build the metadata of all rows as one or several groups of similar width and length."""
    first_token = _first_tokens(rows)
    sources = [_source(row, kv_groups) for row in rows]
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, (row, source) in enumerate(zip(rows, sources, strict=True)):
        blocks = -(-source.length // kv_groups.layout.block_size)
        buckets.setdefault(((row.width - 1).bit_length() // 2, (blocks - 1).bit_length()), []).append(index)
    groups = [_group(members, rows, sources, first_token, kv_groups, device) for members in buckets.values()]
    return StepLayout(torch.empty(0, dtype=torch.long, device=device), groups)


def build_native_source_step(rows: Sequence[RowShape], kv_groups: KvCacheGroups) -> NativeStep:
    """Build the structure that the CPU kernel reads, as `build_native_step` does."""
    size, tables = kv_groups.layout.block_size, kv_groups.layout.tables
    sources = [_source(row, kv_groups) for row in rows]
    used = [-(-source.length // size) for source in sources]
    most_blocks = max(used)
    blocks, first_token, position = array("i"), array("i", [0]), array("i")
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
    return NativeStep(header, arrays, max([source.length for source in sources]))


def _source(row: RowShape, kv_groups: KvCacheGroups) -> SourceShape:
    """The row's source. A row without one, as in warm-up, reads the first position of the first block."""
    if row.source is not None:
        return row.source
    return SourceShape([[0]] * kv_groups.layout.tables, 1)  # type: ignore[list-item]


def _first_tokens(rows: Sequence[RowShape]) -> list[int]:
    """The first token of each row in the step, and the number of tokens."""
    return [0, *np.cumsum([row.width for row in rows]).tolist()]


def _group(
    members: Sequence[int],
    rows: Sequence[RowShape],
    sources: Sequence[SourceShape],
    first_token: Sequence[int],
    kv_groups: KvCacheGroups,
    device: torch.device,
) -> RowGroup:
    size, tables = kv_groups.layout.block_size, kv_groups.layout.tables
    width = np.array([rows[index].width for index in members])
    queries = np.arange(width.max())
    gather = np.array([first_token[index] for index in members])[:, None] + np.minimum(queries, width[:, None] - 1)
    real = queries < width[:, None]
    length = np.array([sources[index].length for index in members])
    used = -(-length // size)
    blocks = np.zeros((tables, len(members), int(used.max())), dtype=np.int64)
    for row, index in enumerate(members):
        for table in range(tables):
            blocks[table, row, : used[row]] = sources[index].blocks[table][: used[row]]
    keys = torch.arange(int(used.max()) * size, device=device)
    seen = keys < to_device(length, device)[:, None, None]  # [rows, 1, keys]
    mask = seen.expand(len(members), len(queries), len(keys))
    held = to_device(blocks, device)
    return RowGroup(
        gather=to_device(gather, device),
        scatter=to_device(np.flatnonzero(real), device),
        targets=to_device(gather[real], device),
        blocks={(table, _EVERYTHING): held[table] for table in range(tables)},
        masks={_EVERYTHING: mask},
        is_whole=len(members) == len(rows) and gather.size == int(width.sum()),
    )
