"""The certificate of a server, its key and the authority of its clients, read again when their files change."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""How often the files may be looked at, in seconds."""
MAX_FILE_BYTES = 1 << 20

_Version = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of PEM files. No `repr` shows the key."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None
    """Certificates by which those of clients are checked."""


class CertificateFiles:
    """Reads the files of a server's certificate, and notices that they have changed. Thread-safe.

    Files that do not fit together, as in the middle of a change, leave the certificate as it was, and are logged.
    """

    def __init__(
        self, certificate: str, key: str, client_ca: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        names = {"certificate": certificate, "key": key} | ({} if client_ca is None else {"client_ca": client_ca})
        self._files = {name: Path(file).expanduser() for name, file in names.items()}
        self._clock = clock
        self._looked_at = clock()
        self._version: _Version = ()
        self._lock = threading.Lock()

    def read(self) -> Certificates:
        """Read the files. Raises `ConfigurationError` for unreadable ones and for a key of another certificate."""
        self._version = self._found()
        return self._read()

    def changed(self) -> Certificates | None:
        """Return the new content if the files have changed and fit together; otherwise `None`."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at < RELOAD_SECONDS:
                return None
            self._looked_at = now
            version = self._found()
            if version == self._version:
                return None
            try:
                found = self._read()
            except ConfigurationError as error:
                logger.error("the certificate of the public APIs stays as it was: %s", error)
                self._version = version
                return None
            if self._found() != version:  # a file changed meanwhile: the next look reads all of them again
                return None
            self._version = version
            logger.info("read the certificate of the public APIs again")
            return found

    def _found(self) -> _Version:
        try:
            states = [file.stat() for file in self._files.values()]
        except OSError:
            return ()
        return tuple((state.st_mtime_ns, state.st_size) for state in states)

    def _read(self) -> Certificates:
        found = {name: _content(name, file) for name, file in self._files.items()}
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            check.load_cert_chain(self._files["certificate"], self._files["key"], password="")
        except (OSError, ValueError) as error:
            reason = f"needed a PEM certificate and its key without a password, found {error}"
            raise ConfigurationError(f"server.tls.certificate, server.tls.key: {reason}") from None
        if "client_ca" in self._files:
            try:
                check.load_verify_locations(self._files["client_ca"])
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"server.tls.client_ca: needed PEM certificates, found {error}") from None
        return Certificates(**found)


def _content(name: str, file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"server.tls.{name}: needed a readable file, found {file}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"server.tls.{name}: needed at most {MAX_FILE_BYTES} bytes, found more in {file}")
    return content
