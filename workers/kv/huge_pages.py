"""Memory for weights, keys and values in large pages; and what was needed to load them is given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

CACHE_LINE = 64
"""Bytes of a cache line."""


def huge_pages(size: int) -> torch.Tensor:
    """`size` bytes of zeros: a step that reads all weights, or long contexts, must not wait for page tables."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has a rule of its own
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Memory in large pages, given out piece by piece."""

    def __init__(self, size: int) -> None:
        self._bytes = huge_pages(size)
        self._used = 0

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of `values` for good."""
        size = values.numel() * values.itemsize
        kept = self._bytes[self._used : self._used + size].view(values.dtype).view(values.shape)
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return kept.copy_(values)


def release_free_memory() -> None:
    """What was freed goes back to the system: the C library would keep it, and a peak would count it twice."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
    if trim is not None:
        trim(0)
