"""Lets the system provide the memory of a KV pool before steps write to it.

The pages of all layers begin at the same block, so one step writes to new pages of every layer at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

from workers.kv.pool import KvPool
from workers.kv.start_memory import release_start_memory

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14, which the module `mmap` does not name."""
_PIECE = 2 << 20
"""Bytes of a call: a huge page."""
_LEAST_PRIORITY = 19
POPULATING = "populate"
"""Name of the thread that populates a pool."""


def populate(pool: KvPool) -> threading.Thread:
    """Start a thread that provides all pages of a pool in the machine's memory, and return it. Contents stay.

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
