"""Blocks of keys and values as files in a directory of this process's own, written by a thread of their own.

The directory's `lock` file stays locked while the process lives; the kernel unlocks it at the process's death,
however it came. So the next process that starts knows which directories nobody reads any more, and removes them.

A block waits in memory until it is written, and is read from there meanwhile. The queue is short: when the disk
cannot keep up, blocks are lost and nobody waits.
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

logger = logging.getLogger(__name__)

_PREFIX = "pilotfish-kv-"
_LOCK = "lock"
_MOST_QUEUED = 64
"""Blocks in memory that wait to be written: about what one step over a long prompt pushes out."""
_CLOSING_SECONDS = 5.0
"""How long a write that has begun may take when the tier is closed."""


@dataclass(slots=True)
class TierCounts:
    """Blocks since the start."""

    saved: int = 0
    loaded: int = 0
    dropped: int = 0
    """No longer in the tier, or refused by it; a block that leaves the host for the disk is one of them."""


class DiskTier:
    """At most `most_bytes` of files. A full, slow or broken disk costs a warning and blocks, never an error.

    For one thread; the writer is its own. What both touch is guarded by `_changed`, which no disk is waited for under.
    """

    def __init__(self, directory: str, most_bytes: int, most_queued: int = _MOST_QUEUED) -> None:
        self.counts = TierCounts()
        self._parent = Path(directory).expanduser()
        self._most_bytes = most_bytes
        self._most_queued = most_queued
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = 0
        self._queued: OrderedDict[bytes, Tensor] = OrderedDict()
        self._changed = threading.Condition()
        self._home: Path | None = None
        self._lock: int | None = None
        self._writer: threading.Thread | None = None
        self._writable = False

    def start(self) -> None:
        """Make the directory, remove those that dead processes left, and start the writer."""
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._parent)
            self._home = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
            self._lock = _lock_new(self._home)
            self._writable = True
            self._writer = threading.Thread(target=self._run, args=(self._home,), name="kv-disk", daemon=True)
            self._writer.start()
        except (OSError, RuntimeError) as error:  # no directory, or no further thread
            self._writable = False
            self._writer = None
            logger.warning("kv.disk_directory cannot be used: no blocks are kept on disk: %s", error)

    def close(self) -> None:
        """End the writer, forget what it has not written, remove the directory. Closing twice is harmless."""
        with self._changed:
            self._writable = False
            self._queued.clear()
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(_CLOSING_SECONDS)
            if self._writer.is_alive():
                logger.warning("the disk under %s does not answer: its last block is not waited for", self._home)
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._home = self._lock = self._writer = None
        with self._changed:
            self._sizes.clear()
            self._bytes = 0

    def flush(self) -> None:
        """Return once nothing waits to be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued)

    def __contains__(self, key: bytes) -> bool:
        with self._changed:
            return key in self._sizes or key in self._queued

    def touch(self, key: bytes) -> bool:
        """Make the block the most recently used one; `False` if it is not here."""
        with self._changed:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                return True
            return key in self._queued

    def wants(self, key: bytes) -> bool:
        """Whether to `save` the block: not if it is here (then it is the most recently used one), nor without room."""
        if self.touch(key):
            return False
        with self._changed:
            if self._writable and len(self._queued) < self._most_queued:
                return True
            self.counts.dropped += 1
            return False

    def save(self, key: bytes, content: Tensor) -> None:
        """Queue `content` `[bytes]`, which nobody else changes from now on; `wants` comes first."""
        with self._changed:
            if not self._writable or content.nbytes > self._most_bytes:
                self.counts.dropped += 1
                return
            self._queued[key] = content
            self._changed.notify_all()

    def load(self, key: bytes) -> Tensor | None:
        """The content of a block `[bytes]`; `None`, and it is forgotten, where the file is not what was written."""
        with self._changed:
            content = self._queued.get(key)
            size = self._sizes.get(key)
        if content is None:
            if size is None or self._home is None:
                return None
            try:
                content = _read(_file(self._home, key), size)
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                self._lose(key, error)
                return None
        self.touch(key)
        self.counts.loaded += 1
        return content

    def _lose(self, key: bytes, error: Exception) -> None:
        """The file could not be read: unless the writer has just dropped it, it is damaged."""
        with self._changed:
            if key not in self._sizes:
                return
            self._forget(key)
        logger.warning("a block on disk is lost: %s", error)
        if self._home is not None:
            _remove(_file(self._home, key))

    def _run(self, home: Path) -> None:
        """The writer's life: ends when the tier is closed, or with the first thing that it cannot write."""
        try:
            while (block := self._next()) is not None:
                self._write(home, *block)
        except OSError as error:
            self._stop_writing("no further blocks are kept on disk: %s", error)
        except BaseException as error:
            self._stop_writing("no further blocks are kept on disk, the writer failed: %r", error)

    def _next(self) -> tuple[bytes, Tensor] | None:
        """The block that waits longest, which can be read from the queue until it is on disk."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or not self._writable)
            return next(iter(self._queued.items())) if self._writable else None

    def _write(self, home: Path, key: bytes, content: Tensor) -> None:
        """Write one block, making room by dropping the least recently used ones."""
        payload = safetensors.torch.save({"block": content, "checksum": torch.tensor([_checksum(content)])})
        fits = len(payload) <= self._most_bytes
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
            while self._sizes and self._bytes + size > self._most_bytes:
                dropped.append(next(iter(self._sizes)))
                self._forget(dropped[-1])
        for key in dropped:
            _remove(_file(home, key))

    def _stop_writing(self, message: str, error: BaseException) -> None:
        """What is on disk stays readable; what waits is lost."""
        with self._changed:
            if self._writable:  # while closing nobody wants to hear of it
                logger.warning(message, error)
            self._writable = False
            self.counts.dropped += len(self._queued)
            self._queued.clear()
            self._changed.notify_all()

    def _forget(self, key: bytes) -> None:
        self._bytes -= self._sizes.pop(key)
        self.counts.dropped += 1


def _file(home: Path, key: bytes) -> Path:
    return home / f"{key.hex()}.safetensors"


def _read(file: Path, size: int) -> Tensor:
    """The whole file into memory, not mapped: a file that shrinks under a mapping kills the process."""
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
    """Put a locked lock file into the directory: it is locked before it has its name, so nobody sees it free."""
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
    """Remove the directories whose lock nobody holds; one without a lock is just being made."""
    for home in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(home / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
            logger.info("removed %s, which a dead process left", home)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
