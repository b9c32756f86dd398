"""Memory at the start: a KV pool gets its pages before steps write to it; what only the start needed is released."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from workers.kv.pool import KvPool

_LASTING = 1.0
"""Seconds for which a mapping is unchanged before its pages are given back: a loader maps and changes libraries in
milliseconds."""
_RELEASED_AT_ONCE = 16 << 20
"""Least bytes that `FreedMemory` returns."""
_RELEASED = threading.Event()


def release_free_memory() -> None:
    """Return freed heap memory to the operating system; otherwise the C library retains it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class FreedMemory:
    """Returns freed heap memory to the operating system from time to time, while many matrices come and go."""

    def __init__(self) -> None:
        self._freed = 0

    def add(self, size: int) -> None:
        """`size` bytes were freed, or about as many."""
        self._freed += size
        if self._freed >= _RELEASED_AT_ONCE:
            self._freed = 0
            release_free_memory()


def release_start_memory() -> None:
    """Give back what only the start of this process needed: freed heap memory, and pages of code that ran once.

    A library's pages stay in the system's cache, from which the process maps those that it uses again. This takes a
    second. Calls after the first one do nothing.
    """
    if _RELEASED.is_set():
        return
    _RELEASED.set()
    release_free_memory()
    release_code()


def release_code() -> None:
    """Unmap the pages of libraries that hold bytes of their files and nothing else.

    They cannot be written to, none of them is a copy, and they lie where they lay a second before: Python unloads no
    library, and none that is being loaded is touched. The loader's own lock is not used, since a thread that waits for
    it may have Python's.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    maps = Path("/proc/self/smaps")
    with contextlib.suppress(OSError):  # no Linux
        before = set(unchanged_code(maps.read_text("utf-8", "replace")))
        time.sleep(_LASTING)
        for begin, size, _ in before.intersection(unchanged_code(maps.read_text("utf-8", "replace"))):
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def unchanged_code(maps: str) -> Iterator[tuple[int, int, str]]:
    """Address, size and description of each mapping of a library in `/proc/PID/smaps` without a page of the process.

    A page that the loader or the process has changed counts as anonymous, or as swapped if it was written out.
    """
    begin, size, line, is_own = 0, 0, "", False
    for line_of_maps in maps.splitlines():
        name, *values = line_of_maps.split()
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            is_code = len(values) > 4 and values[4].startswith("/") and ".so" in values[4] and values[0][1] == "-"
            begin, size = int(first, 16), int(last, 16) - int(first, 16) if is_code else 0
            line, is_own = line_of_maps, False
        elif name == "Anonymous:":
            is_own = int(values[0]) > 0
        elif name == "Swap:" and size and not is_own and int(values[0]) == 0:
            yield begin, size, line


_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14, which the module `mmap` does not name."""
_PIECE = 2 << 20
"""Bytes of a call: a huge page."""
_LEAST_PRIORITY = 19
POPULATING = "populate"
"""Name of the thread that populates a pool."""


def populate(pool: KvPool) -> threading.Thread:
    """Start a thread that provides all pages of a pool in the machine's memory, and return it. Contents stay.

    The pages of all layers begin at the same block, so one step writes to new pages of every layer at once.

    Its priority is the lowest, and it ends early when the pool is freed, or on a system that cannot do this. At last it
    gives back what only the start of this process needed, so that the process holds its model and its pool.
    """
    thread = threading.Thread(target=_populate, args=(weakref.ref(pool),), name=POPULATING, daemon=True)
    thread.start()
    return thread


def _populate(reference: weakref.ref[KvPool]) -> None:
    pieces, advise = _pieces(reference), getattr(ctypes.CDLL(None), "madvise", None)
    with contextlib.suppress(OSError, AttributeError):  # on Linux, a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
    for address, size in pieces:
        # If the pool is freed during a call, that call fails, or provides memory that another owner has there now.
        if reference() is None:
            return
        if advise is None:
            break
        if advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE):
            break
    release_start_memory()


def _pieces(reference: weakref.ref[KvPool]) -> list[tuple[int, int]]:
    """Addresses and sizes of the pool's whole pages, in pieces, those of the first blocks of all layers first."""
    pool = reference()
    found: list[tuple[int, int, int]] = []
    for tensor in () if pool is None else (*pool.keys, *pool.values):
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        found += [(first - begin, first, min(_PIECE, end - first)) for first in range(begin, end, _PIECE)]
    return [(address, size) for _, address, size in sorted(found)]
