"""The release of memory that only the start of a process needed."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

_LOADED, _WRITABLE = 1, 2
"""Kind of a segment that is mapped (`PT_LOAD`), and the flag of one that may be written to (`PF_W`)."""


class _Segment(ctypes.Structure):
    """`Elf64_Phdr`."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "physical", "file_size", "size", "alignment")),
    ]


class _Library(ctypes.Structure):
    """The first fields of `dl_phdr_info`."""

    _fields_ = [
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    ]


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
    if sys.platform == "linux" and sys.maxsize > 1 << 32:
        _release_code()


def _release_code() -> None:
    """Unmap the pages of all loaded libraries that hold bytes of their files and nothing else.

    These are the segments that may not be written to: the loader changes no page of them. It keeps its lock while it
    lists libraries, so none is unloaded, and nothing else comes to its place, before its pages are given back. The
    calls keep Python's lock, since a thread that has it may wait for the loader's.
    """
    library = ctypes.PyDLL(None)
    iterate, advise = getattr(library, "dl_iterate_phdr", None), getattr(library, "madvise", None)
    if iterate is None or advise is None:
        return
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE

    def release(found: Any, _: int, __: int) -> int:
        one = found.contents
        for segment in one.segments[: one.count]:
            if segment.kind == _LOADED and not segment.flags & _WRITABLE:
                begin = (one.base + segment.address) // page * page
                end = (one.base + segment.address + segment.file_size) // page * page
                advise(begin, end - begin, mmap.MADV_DONTNEED)
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    iterate(kind(release), None)
