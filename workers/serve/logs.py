"""How the processes of a cluster log: the least severe level, and text or one JSON object per line.

With the form `json`, the processes on the machine of `pilotfish serve` send their lines to it: through the Unix socket
`SOCKET` in the directory of Ray's session, which only this user may enter. Elsewhere a line goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import ray

SOCKET = "pilotfish-log"
"""Name of the socket in the directory for the sockets of Ray's session. It keeps the bounds of messages."""
MOST_BYTES = 1 << 17
"""Longest line, in bytes."""

_OWN = ("cluster", "workers", "deploy", "pilotfish")
"""Names that the loggers of Pilotfish begin with."""
_SERVE = "ray.serve"
_MOST_CHARS = 10_000
"""Longest message and longest exception of a line, in characters. JSON takes at most six bytes for each."""


class JsonFormatter(logging.Formatter):
    """Writes a log record as one JSON object. The attribute `fields` of a record brings more of its members."""

    def __init__(self, process: str) -> None:
        """`process` is the role of this process, such as `ingress`."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = getattr(record, "fields", {})
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.msg.partition(" ")[0] if fields else record.getMessage()[:_MOST_CHARS],
            **fields,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)[-_MOST_CHARS:]
        return json.dumps(entry, default=str)


class SocketHandler(logging.Handler):
    """Sends each line as one message to a Unix socket. It never waits and never raises into the code that logs.

    Lines that nobody reads, and those above `MOST_BYTES`, are lost and counted.
    """

    def __init__(self, file: Path) -> None:
        """Connect to the socket. Raises `OSError`, and `AttributeError` on a platform without such sockets."""
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(str(file))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send the line of a record, and before it how many were lost. A record without a text is told on stderr."""
        try:
            line = self.format(record).encode()
        except Exception:  # what is logged may raise anything
            self.handleError(record)
            return
        if len(line) > MOST_BYTES:
            self._lost += 1
            return
        try:
            if self._lost:
                text = f"{self._lost} lines of this process were lost: too long, or faster than they were read"
                lost = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
                self._socket.send(self.format(lost).encode())
                self._lost = 0
            self._socket.send(line)
        except OSError:
            self._lost += 1


def set_logging(level: str, form: str, process: str) -> None:
    """Set the level of this process's log, and with the form `json` write every record as JSON.

    `process` is the role of this process. Other libraries log warnings and errors alone, Ray Serve too. A second call
    sets the level alone.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.setLevel(max(least, logging.WARNING))
    for name in _OWN:
        logging.getLogger(name).setLevel(least)
    if form != "json":
        return
    is_sent = any(isinstance(handler, SocketHandler) for handler in root.handlers) or forward_warnings(process)
    if not is_sent and not root.handlers:
        root.addHandler(logging.StreamHandler())
    for handler in root.handlers:
        handler.setFormatter(JsonFormatter(process))


def forward_warnings(process: str) -> bool:
    """Send the records of this process to `serve`, Serve's warnings and errors too. `process` is its role.

    Returns whether `serve` collects them.
    """
    directory = sockets_directory()
    if directory is None:
        return False
    try:
        sending = SocketHandler(directory / SOCKET)
    except (AttributeError, OSError):
        return False
    sending.setFormatter(JsonFormatter(process))
    logging.getLogger().addHandler(sending)
    logging.getLogger(_SERVE).addHandler(_WarningsOf(sending))  # it passes nothing on to the root
    return True


def sockets_directory() -> Path | None:
    """The directory for the sockets of the Ray session of this process, or `None` without a session."""
    node = ray._private.worker._global_node  # public functions name the session alone
    return None if node is None else Path(node.get_sockets_dir_path())


class _WarningsOf(logging.Handler):
    """Passes warnings and errors of another logger on to a handler."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._handler = handler

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.getLogger().level:
            self._handler.handle(record)
