"""A file of memory regions with a header, which is read whole or not at all.

It begins with a fixed prefix, then the header as JSON, then the regions. The prefix has a hash of the header, and the
header a sum of every few megabytes, so that a damaged file is recognized. Only files that no other user can write are
read. A file is written beside its name and then renamed, so that no reader sees a part of it.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.kv.huge_pages import CACHE_LINE, huge_pages

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""End of the name of a file that is being written."""
_MAGIC = b"PFPACK01"
_PREFIX = struct.Struct("<8sQ32s")
"""Magic, bytes of the header, hash of the header."""
_MOST_HEADER_BYTES = 1 << 26
_CHUNK = 1 << 22
"""Bytes with one sum. A thread reads and adds up one chunk at a time."""
_MOST_THREADS = 4


def padded_size(size: int) -> int:
    """`size` bytes, rounded up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def write_regions(file: Path, key: str, content: Mapping[str, Any], regions: Sequence[torch.Tensor]) -> None:
    """Write contiguous CPU tensors one after another, each padded to whole cache lines. `content` is JSON.

    Raises `OSError`.
    """
    parts = [_padded(region) for region in regions]
    sums = [_sum(part[first:last]) for part in parts for first, last in _chunks(len(part))]
    values = {"key": key, "content": content, "sizes": [len(part) for part in parts], "sums": sums}
    header = json.dumps(values).encode()
    handle, name = tempfile.mkstemp(prefix=f"{file.stem}.", suffix=PARTIAL, dir=file.parent)
    try:
        with os.fdopen(handle, "wb", buffering=0) as opened:
            for piece in (_PREFIX.pack(_MAGIC, len(header), _digest(header)), header, *parts):
                view = memoryview(piece).cast("B")
                while view:
                    view = view[opened.write(view) :]
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def read_regions(file: Path, key: str) -> tuple[dict[str, Any], torch.Tensor] | None:
    """The content, and all regions one after another in huge pages. `None` if there is no valid file with this key."""
    if not hasattr(os, "preadv"):  # neither Linux nor BSD
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        return _read(descriptor, key)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: packed weights are refused and will be written again: %s", file, error)
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int, key: str) -> tuple[dict[str, Any], torch.Tensor]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise ValueError("it is no plain file of this user that nobody else may write")
    magic, length, digest = _PREFIX.unpack(os.pread(descriptor, _PREFIX.size, 0).ljust(_PREFIX.size, b"\0"))
    if magic != _MAGIC or length > _MOST_HEADER_BYTES:
        raise ValueError("its first bytes are wrong")
    header = os.pread(descriptor, length, _PREFIX.size)
    if _digest(header) != digest:
        raise ValueError("its header is damaged")
    values = json.loads(header)
    sizes = [int(size) for size in values["sizes"]]
    start = _PREFIX.size + length
    if values["key"] != key:
        raise ValueError("it belongs to another model or other kernels")
    if min(sizes, default=0) <= 0 or start + sum(sizes) != status.st_size:
        raise ValueError(f"it has {status.st_size} bytes instead of {start + sum(sizes)}")
    memory = huge_pages(sum(sizes))
    _read_chunks(descriptor, start, sizes, values["sums"], memory.numpy())
    return values["content"], memory


def _read_chunks(descriptor: int, start: int, sizes: Sequence[int], sums: Sequence[int], memory: Any) -> None:
    """Fill `memory` from the file at `start`. Raises `ValueError` if a sum differs."""
    spans: list[tuple[int, int]] = []
    offset = 0
    for size in sizes:
        spans.extend((offset + first, offset + last) for first, last in _chunks(size))
        offset += size

    def fill(job: tuple[tuple[int, int], int]) -> None:
        (first, last), expected = job
        view = memoryview(memory[first:last])
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], start + first + done)
            if count == 0:
                raise ValueError("it ended while it was read")
            done += count
        if _sum(memory[first:last]) != expected:
            raise ValueError(f"bytes {start + first} to {start + last} are damaged")

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(fill, zip(spans, sums, strict=True)):
            pass


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(size, first + _CHUNK)) for first in range(0, size, _CHUNK))


def _sum(part: Any) -> int:
    """The sum of the 64-bit integers of a chunk, modulo 2^64: it reads memory as fast as memory is."""
    return int(part.view(np.uint64).sum(dtype=np.uint64))


def _padded(region: torch.Tensor) -> Any:
    """The bytes of a tensor, with zeros up to a whole cache line."""
    found = region.detach().contiguous().flatten().view(torch.uint8).numpy()
    missing = padded_size(len(found)) - len(found)
    return np.pad(found, (0, missing)) if missing else found


def _digest(header: bytes) -> bytes:
    return blake2b(header, digest_size=32).digest()
