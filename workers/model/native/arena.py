"""Memory for weights: in large pages when they are packed, and given back as they were loaded."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

LINE = 64
"""Bytes of a cache line."""


class Arena:
    """Memory in large pages: a step that reads all weights must not wait for thousands of page tables."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._used = 0

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of `values` for good."""
        size = values.numel() * values.itemsize
        kept = self._bytes[self._used : self._used + size].view(values.dtype).view(values.shape)
        self._used += -(-size // LINE) * LINE
        return kept.copy_(values)


def give_memory_back() -> None:
    """What was freed goes back to the system: the C library would keep it, and a peak would count it twice."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
    if trim is not None:
        trim(0)
