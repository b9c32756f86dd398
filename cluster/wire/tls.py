"""TLS: credentials of servers, read again when their files change, and of clients of the public APIs."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.core.config.base import with_home
from cluster.core.config.public_tls import PublicTlsSection
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
        self,
        certificate: str,
        key: str,
        client_ca: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_internal: bool = False,
    ) -> None:
        """`is_internal`: the files are those of `cluster.tls`, else of `server.tls`. Errors name their settings."""
        names = {"certificate": certificate, "key": key} | ({} if client_ca is None else {"client_ca": client_ca})
        section, authority = ("cluster.tls", "ca") if is_internal else ("server.tls", "client_ca")
        self._settings = {name: f"{section}.{name}" for name in names} | {"client_ca": f"{section}.{authority}"}
        self._files = {name: with_home(self._settings[name], file) for name, file in names.items()}
        self._whose = "internal services" if is_internal else "public APIs"
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
                logger.error("the certificate of the %s stays as it was: %s", self._whose, error)
                self._version = version
                return None
            if self._found() != version:  # a file changed meanwhile: the next look reads all of them again
                return None
            self._version = version
            logger.info("read the certificate of the %s again", self._whose)
            return found

    def _found(self) -> _Version:
        try:
            states = [file.stat() for file in self._files.values()]
        except OSError:
            return ()
        return tuple((state.st_mtime_ns, state.st_size) for state in states)

    def _read(self) -> Certificates:
        settings = self._settings
        found = {name: _content(settings[name], file) for name, file in self._files.items()}
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            check.load_cert_chain(self._files["certificate"], self._files["key"], password="")
        except (OSError, ValueError) as error:
            reason = f"needed a PEM certificate and its key without a password, found {error}"
            raise ConfigurationError(f"{settings['certificate']}, {settings['key']}: {reason}") from None
        if "client_ca" in self._files:
            try:
                check.load_verify_locations(self._files["client_ca"])
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"{settings['client_ca']}: needed PEM certificates, found {error}") from None
        return Certificates(**found)


def _content(setting: str, file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{setting}: needed a readable file, found {file}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{setting}: needed at most {MAX_FILE_BYTES} bytes, found more in {file}")
    return content


def server_files(tls: PublicTlsSection) -> tuple[CertificateFiles, Certificates]:
    """Return the files of a server's certificate, and their content. Raises `ConfigurationError`."""
    if tls.pair is None:
        raise ConfigurationError("server.tls.certificate and server.tls.key: needed to serve with TLS, found none")
    files = CertificateFiles(*tls.pair, tls.client_ca)
    return files, files.read()


def server_credentials(tls: PublicTlsSection) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server that presents a changed certificate without a restart.

    With `client_ca`, clients must present a certificate that it has signed. Raises `ConfigurationError`.
    """
    return renewed_credentials(*server_files(tls), demands_certificate=tls.client_ca is not None)


def renewed_credentials(
    files: CertificateFiles, first: Certificates, *, demands_certificate: bool
) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server with the certificate `first`, and later with what `files` have changed to."""

    def changed() -> grpc.ServerCertificateConfiguration | None:
        found = files.changed()
        return None if found is None else _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        changed,  # type: ignore[arg-type]  # `None` leaves the certificate as it is
        require_client_authentication=demands_certificate,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificates.client_ca)


def client_context(
    tls: PublicTlsSection, *, presents_certificate: bool = True, checks_name: bool = False
) -> ssl.SSLContext:
    """Return the TLS of an HTTP client.

    The server's certificate is checked. Its name need not be, where the server listens at an address of this machine.
    Raises `ConfigurationError`.
    """
    name = f"server.tls.{'ca' if tls.ca else 'certificate'}"
    trusted = None if tls.trusted is None else with_home(name, tls.trusted)
    try:
        context = ssl.create_default_context(cafile=trusted)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{name}: needed a readable PEM file, found {trusted}: {error}") from None
    context.check_hostname = checks_name
    try:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # `certificate` need not be an authority's
        if presents_certificate and tls.client_pair is not None:
            certificate, key = tls.client_pair
            context.load_cert_chain(
                with_home("server.tls.client_certificate", certificate), with_home("server.tls.client_key", key)
            )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"server.tls: needed readable PEM files, found {error}") from None
    return context


def read_file(setting: str, file: str) -> bytes:
    """The content of the file that `setting` names. Raises `ConfigurationError` if it cannot be read."""
    try:
        return with_home(setting, file).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{setting}: needed a readable file, found {file}: {error.strerror}") from None
