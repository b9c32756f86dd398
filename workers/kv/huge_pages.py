"""Memory in huge pages for weights, keys and values, and the release of memory that loading needed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

CACHE_LINE = 64
"""Bytes per cache line."""


def huge_pages(size: int) -> torch.Tensor:
    """`size` zero bytes in huge pages: a step reads all weights, and small pages would cost it TLB misses."""
    # The mapping is private, because the system has separate settings for huge pages of shared memory.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Memory in huge pages that is handed out piece by piece and freed as a whole."""

    def __init__(self, size: int) -> None:
        self._bytes = huge_pages(size)
        self._used = 0

    @property
    def taken(self) -> torch.Tensor:
        """The bytes of this memory that were handed out so far, uint8 `[bytes]`."""
        return self._bytes[: self._used]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in the arena, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        taken = self._bytes[self._used : self._used + size].view(dtype).view(*shape)
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return taken


def release_free_memory() -> None:
    """Return freed heap memory to the operating system; otherwise the C library retains it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
