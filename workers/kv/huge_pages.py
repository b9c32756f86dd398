"""Memory in huge pages for weights, keys and values, and the release of memory that loading needed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

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


def release_free_memory() -> None:
    """Return freed heap memory to the operating system; otherwise the C library retains it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


@cache
def release_start_memory() -> None:
    """Give back what only the start of this process needed: freed heap memory, and pages of code that ran once.

    A library's pages stay in the system's cache, from which the process maps those that it uses again. Calls after the
    first one do nothing.
    """
    release_free_memory()
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    with contextlib.suppress(OSError):  # no Linux
        for begin, size in list(_clean_file_pages(Path("/proc/self/smaps").read_text("utf-8", "replace"))):
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _clean_file_pages(maps: str) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of the mappings in `/proc/PID/smaps` that hold bytes of a file and none of the process.

    They cannot be written to, and no page of them is a copy, as those are that a library's loader has changed.
    """
    begin, size = 0, 0
    for line in maps.splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            is_file = len(values) > 4 and values[4].startswith("/") and values[0][1] == "-"
            begin, size = int(first, 16), int(last, 16) - int(first, 16) if is_file else 0
        elif name == "Anonymous:" and size and int(values[0]) == 0:
            yield begin, size
