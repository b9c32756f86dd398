"""Memory in huge pages for weights, keys and values."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

CACHE_LINE = 64
"""Bytes per cache line."""
_REGION = 64 << 20
"""Least bytes of a mapping of an arena. Pages that are not written to take no memory."""


def huge_pages(size: int) -> torch.Tensor:
    """`size` zero bytes in huge pages: a step reads all weights, and small pages would cost it TLB misses."""
    # The mapping is private, because the system has separate settings for huge pages of shared memory.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Memory in huge pages that is handed out piece by piece and freed as a whole. It grows as it is needed."""

    def __init__(self) -> None:
        self._regions: list[tuple[torch.Tensor, int]] = []
        """Mappings, and how many bytes of each were handed out."""

    @property
    def taken(self) -> list[torch.Tensor]:
        """The bytes that were handed out so far, in regions of uint8 `[bytes]`."""
        return [region[:used] for region, used in self._regions]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in the arena, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // CACHE_LINE) * CACHE_LINE
        region, used = self._regions[-1] if self._regions else (torch.empty(0, dtype=torch.uint8), 0)
        if used + padded > len(region):
            region, used = huge_pages(max(padded, _REGION)), 0
            self._regions.append((region, used))
        self._regions[-1] = (region, used + padded)
        return region[used : used + size].view(dtype).view(*shape)
