"""The disk tier: KV blocks as files in a directory that this process owns, written by a background thread.

The directory's `lock` file is locked while the process runs. The kernel unlocks it when the process ends for
any reason. So the next process that starts recognizes abandoned directories and removes them.

A block is queued in memory until it is written, and can be loaded from the queue. The queue is short: if the disk is
too slow, blocks are dropped, and no step waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from cluster.core.config.base import with_home

logger = logging.getLogger(__name__)

_PREFIX = "pilotfish-kv-"
_LOCK = "lock"
_MAX_QUEUED = 64
"""Blocks that may wait in memory: about as many as one step over a long prompt evicts."""
_CLOSING_SECONDS = 5.0
"""Longest time that `close` waits for the write in progress, in seconds."""


@dataclass(slots=True)
class TierCounts:
    """Numbers of blocks since the start."""

    saved: int = 0
    loaded: int = 0
    dropped: int = 0
    """Evicted or refused by the tier. A block that moves from the host to the disk counts as dropped by the host."""


class DiskTier:
    """Holds at most `max_bytes` of files. A full, slow or broken disk causes a warning and lost blocks, never an error.

    One thread calls the methods; a second one writes. `_changed` guards what both use, and no thread accesses the
    disk while it holds it.
    """

    def __init__(self, directory: str, max_bytes: int, max_queued: int = _MAX_QUEUED) -> None:
        self.counts = TierCounts()
        self._parent = with_home("target.kv.disk_directory", directory)
        self._max_bytes = max_bytes
        self._max_queued = max_queued
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = 0
        self._queued: OrderedDict[bytes, Tensor] = OrderedDict()
        self._changed = threading.Condition()
        self._home: Path | None = None
        self._lock: int | None = None
        self._writer: threading.Thread | None = None
        self._writable = False

    def start(self) -> None:
        """Make the directory, remove those of dead processes, and start the writer."""
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._parent)
            self._home = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
            self._lock = _lock_new(self._home)
            self._writable = True
            self._writer = threading.Thread(target=self._run, args=(self._home,), name="kv-disk", daemon=True)
            self._writer.start()
        except (OSError, RuntimeError) as error:  # no directory, or no thread could be started
            self._writable = False
            self._writer = None
            logger.warning("kv.disk_directory cannot be used: no blocks are saved to disk: %s", error)

    def close(self) -> None:
        """Stop the writer, drop the queue, remove the directory. Closing again does nothing."""
        with self._changed:
            self._writable = False
            self._queued.clear()
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(_CLOSING_SECONDS)
            if self._writer.is_alive():
                logger.warning("the disk under %s does not respond; its last block is lost", self._home)
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._home = None
        self._lock = None
        self._writer = None
        with self._changed:
            self._sizes.clear()
            self._bytes = 0

    def flush(self) -> None:
        """Block until the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued)

    def __contains__(self, key: bytes) -> bool:
        with self._changed:
            return key in self._sizes or key in self._queued

    def touch(self, key: bytes) -> bool:
        """Mark the block as most recently used. Returns `False` if it is not here."""
        with self._changed:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                return True
            return key in self._queued

    def wants(self, key: bytes) -> bool:
        """Whether to `save` the block: it is not stored, and the queue has room. Counts as a use of a stored block."""
        if self.touch(key):
            return False
        with self._changed:
            if self._writable and len(self._queued) < self._max_queued:
                return True
            self.counts.dropped += 1
            return False

    def save(self, key: bytes, content: Tensor) -> None:
        """Queue `content` `[bytes]`, which the caller must not change any more. Call `wants` first."""
        with self._changed:
            if not self._writable or content.nbytes > self._max_bytes:
                self.counts.dropped += 1
                return
            self._queued[key] = content
            self._changed.notify_all()

    def load(self, key: bytes) -> Tensor | None:
        """The content of a block `[bytes]`. Returns `None` and drops the block if its file is missing or damaged."""
        with self._changed:
            content = self._queued.get(key)
            size = self._sizes.get(key)
        if content is None:
            if size is None or self._home is None:
                return None
            try:
                content = _read(_file(self._home, key), size)
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                self._drop_damaged(key, error)
                return None
        self.touch(key)
        self.counts.loaded += 1
        return content

    def _drop_damaged(self, key: bytes, error: Exception) -> None:
        """Drop a block whose file could not be read, unless the writer has just evicted it."""
        with self._changed:
            if key not in self._sizes:
                return
            self._evict(key)
        logger.warning("a block on disk is lost: %s", error)
        if self._home is not None:
            _remove(_file(self._home, key))

    def _run(self, home: Path) -> None:
        """The writer thread's loop. It ends when the tier is closed or a write fails."""
        try:
            while (block := self._next()) is not None:
                self._write(home, *block)
        except OSError as error:
            self._stop_writing("no further blocks are saved to disk: %s", error)
        except BaseException as error:
            self._stop_writing("no further blocks are saved to disk, the writer failed: %r", error)

    def _next(self) -> tuple[bytes, Tensor] | None:
        """The oldest queued block, or `None` when the tier is closed. It stays in the queue until it is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or not self._writable)
            return next(iter(self._queued.items())) if self._writable else None

    def _write(self, home: Path, key: bytes, content: Tensor) -> None:
        """Write one block, and evict the least recently used ones to make room for it."""
        payload = safetensors.torch.save({"block": content, "checksum": torch.tensor([_checksum(content)])})
        fits = len(payload) <= self._max_bytes
        if fits:
            self._make_room(home, len(payload))
            file = _file(home, key)
            try:
                file.write_bytes(payload)
            except OSError:
                _remove(file)
                raise
        with self._changed:
            waited = self._queued.pop(key, None) is not None
            if fits and waited:
                self._sizes[key] = len(payload)
                self._bytes += len(payload)
                self.counts.saved += 1
            elif waited:
                self.counts.dropped += 1
            self._changed.notify_all()

    def _make_room(self, home: Path, size: int) -> None:
        dropped: list[bytes] = []
        with self._changed:
            while self._sizes and self._bytes + size > self._max_bytes:
                dropped.append(next(iter(self._sizes)))
                self._evict(dropped[-1])
        for key in dropped:
            _remove(_file(home, key))

    def _stop_writing(self, message: str, error: BaseException) -> None:
        """Stop saving and drop the queue. Blocks on disk stay readable."""
        with self._changed:
            if self._writable:  # failures while closing do not matter
                logger.warning(message, error)
            self._writable = False
            self.counts.dropped += len(self._queued)
            self._queued.clear()
            self._changed.notify_all()

    def _evict(self, key: bytes) -> None:
        self._bytes -= self._sizes.pop(key)
        self.counts.dropped += 1


def _file(home: Path, key: bytes) -> Path:
    return home / f"{key.hex()}.safetensors"


def _read(file: Path, size: int) -> Tensor:
    """Read the whole file. It is not mapped: if a mapped file shrinks, the process is killed."""
    with file.open("rb") as stream:
        payload = stream.read(size + 1)
    if len(payload) != size:
        raise ValueError(f"{file} has another size than the {size} bytes that were written")
    tensors = safetensors.torch.load(payload)
    content = tensors["block"]
    if _checksum(content) != int(tensors["checksum"]):
        raise ValueError(f"{file} has other bytes than were written")
    return content


def _checksum(content: Tensor) -> int:
    return zlib.crc32(content.numpy().data)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


def _lock_new(home: Path) -> int:
    """Create the lock file. It is locked before it gets its name, so no process ever sees it unlocked."""
    unnamed = home / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(home / _LOCK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(parent: Path) -> None:
    """Remove the directories whose lock no process holds. One without a lock file is being created."""
    for home in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(home / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
            logger.info("removed %s, left by a process that has ended", home)
        except OSError:
            pass  # its process is running
        finally:
            os.close(descriptor)
