"""Small blocks for the offload tiers. Each number has different content, bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.core.config.target_section import KvSection
from workers.kv.pool import KvPool
from workers.kv.tiers import Tiers

CPU = torch.device("cpu")
BLOCK_BYTES = 2 * 2 * (4 * 1 * 8) * 2
"""Keys and values of two layers: 4 tokens, 1 head of 8 numbers, 2 bytes each."""
FILE_BYTES = BLOCK_BYTES + 200
"""A file has a header."""


def block(number: int) -> list[torch.Tensor]:
    """The content of block `number`, which no other block has. It contains NaN too."""
    drawn = torch.randn(4, 4, 1, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
    drawn[0, 0, 0, 0] = float("nan")
    return list(drawn)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def empty() -> list[torch.Tensor]:
    return [torch.zeros_like(part) for part in block(0)]


def holds(tiers: Tiers, number: int) -> bool:
    """Whether the block is loaded bit by bit. Checks that `find` reports the same."""
    found, parts = tiers.find(key(number)), empty()
    assert tiers.load(key(number), parts) == found
    if found:
        for part, original in zip(parts, block(number), strict=True):
            assert torch.equal(part.view(torch.int16), original.view(torch.int16))
    return found


def held(tiers: Tiers, numbers: range) -> list[int]:
    return [number for number in numbers if tiers.find(key(number))]


def tiers_of(host_blocks: int = 0, directory: Path | None = None, disk_blocks: int = 0) -> Tiers:
    section = KvSection(
        host_bytes=host_blocks * BLOCK_BYTES,
        disk_directory=str(directory) if directory else None,
        disk_bytes=disk_blocks * FILE_BYTES,
    )
    return Tiers(section, BLOCK_BYTES, CPU)


def always_load(pool: KvPool) -> None:
    """Let computing a token cost 1 s, so that a pool with tiers always loads stored blocks."""
    if pool.tiers is not None:
        pool.tiers.costs.record_compute(1 << 40, 1 << 40, float(1 << 40))


def save(tiers: Tiers, *numbers: int) -> None:
    """Save the blocks one after another. Each is written before the next is saved."""
    for number in numbers:
        tiers.save(key(number), block(number))
        tiers.flush()
