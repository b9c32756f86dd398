"""The log of `pilotfish serve` as JSON: its own lines and those of all processes of its Ray, one stream on stdout."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

from workers.serve.logs import MOST_BYTES, SOCKET, JsonFormatter, set_logging

_POLL_SECONDS = 0.2
_END_SECONDS = 5.0
"""How long lines that have arrived may take to be written at the end."""

logger = logging.getLogger(__name__)


class LogStream:
    """Writes lines to a stream, whole and one at a time. A context manager; it collects lines until it ends.

    The lines of other processes come through a Unix socket that keeps the bounds of messages.
    """

    def __init__(self, level: str, stream: TextIO) -> None:
        """`level` is the least severe level of this process's own lines."""
        self._level = level
        self._own = logging.StreamHandler(stream)
        self._own.setFormatter(JsonFormatter("serve"))
        self._ending = threading.Event()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Send the records of this process to the stream, those of Ray and of Python's warnings, too."""
        logging.getLogger().handlers = [self._own]
        set_logging(self._level, "json", "serve")
        from ray import serve  # noqa: F401 - it gives its logger a handler, which must not come later

        for name in ("ray", "ray.serve"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [], True
        logging.captureWarnings(True)
        return self

    def __exit__(self, *_: object) -> None:
        """Write what other processes have sent, and stop."""
        self._ending.set()
        if self._reader is not None:
            self._reader.join(_END_SECONDS)

    def collect(self, directory: Path) -> None:
        """Listen for the other processes at a socket in `directory`. Only this user may enter it.

        Where there can be none, such as below a directory with a long name, it warns: their lines go to their stderr.
        """
        file = directory / SOCKET
        try:
            listener = _listen(file)
        except (AttributeError, OSError) as error:  # a platform without such sockets lacks their names
            logger.warning("lines of other processes go to their stderr, in Ray's logs: no socket %s: %s", file, error)
            return
        self._reader = threading.Thread(target=self._read, args=(listener,), name="log-stream", daemon=True)
        self._reader.start()

    def _read(self, listener: socket.socket) -> None:
        """Write each message as a line. Returns once this ends and nothing more has arrived."""
        with listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                found = selector.select(_POLL_SECONDS)
                if not found and self._ending.is_set():
                    return
                for key, _ in found:
                    if key.data is None:
                        _accept(listener, selector)
                    elif not self._write_next(key.data):
                        selector.unregister(key.data)
                        key.data.close()

    def _write_next(self, connection: socket.socket) -> bool:
        """Write the next line of a process. Returns `False` if it has closed the connection."""
        try:
            line = connection.recv(MOST_BYTES)
        except OSError:
            return False
        if line:
            self._write(line.decode(errors="replace"))
        return bool(line)

    def _write(self, line: str) -> None:
        self._own.acquire()
        try:
            with suppress(OSError, ValueError):  # nobody reads the stream any more
                self._own.stream.write(f"{line}\n")
                self._own.stream.flush()
        finally:
            self._own.release()


def _listen(file: Path) -> socket.socket:
    """Listen at a socket that only this user may use. Raises `OSError`, `AttributeError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(file))
        file.chmod(0o600)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    """Accept the next process. Without a free file descriptor it waits, and the next call tries again."""
    try:
        connection, _ = listener.accept()
    except OSError:
        time.sleep(_POLL_SECONDS)
        return
    selector.register(connection, selectors.EVENT_READ, connection)
