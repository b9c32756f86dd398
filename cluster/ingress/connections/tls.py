"""TLS of the HTTP server: its options, certificates that clients must present, and changed files."""

from __future__ import annotations

import ssl
from pathlib import Path
from weakref import WeakKeyDictionary

import uvicorn

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.errors import ConfigurationError
from cluster.wire.tls import CertificateFiles, server_files


def tls_options(tls: PublicTlsSection | None) -> dict[str, str]:
    """Return the options of TLS, as uvicorn and Ray Serve's proxy name them. Raises `ConfigurationError`."""
    if tls is None:
        return {}
    server_files(tls)
    files = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.client_ca}
    return {name: str(Path(file).expanduser()) for name, file in files.items() if file is not None}


class ServerTls:
    """The TLS of one HTTP server.

    Clients must present a certificate if the server has certificates to check them by. Ray Serve's proxy has no
    option for that.
    """

    def __init__(self, context: ssl.SSLContext, certificate: str, key: str, client_ca: str | None) -> None:
        self._context = context
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._files = CertificateFiles(certificate, key, client_ca)
        self._files.read()
        self.demands_certificate = client_ca is not None
        """Whether clients must present a certificate."""
        if self.demands_certificate:
            context.verify_mode = ssl.CERT_REQUIRED

    def renew(self) -> None:
        """Take over changed files, for the connections that begin from now on.

        Certificates that were removed from the authorities of clients stay in force until a restart.
        """
        if self._files.changed() is not None:
            self._context.load_cert_chain(self._certificate, self._key)
            if self._client_ca is not None:
                self._context.load_verify_locations(self._client_ca)


_servers: WeakKeyDictionary[uvicorn.Config, ServerTls] = WeakKeyDictionary()


def server_tls(config: uvicorn.Config) -> ServerTls | None:
    """Return the TLS of the server with this loaded configuration; `None` without TLS. Raises `ConfigurationError`."""
    if config.ssl is None:
        return None
    found = _servers.get(config)
    if found is None:
        certificate, key, ca = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
        if certificate is None or key is None:
            raise ConfigurationError("the HTTP server: needed files of a certificate and its key, found none")
        found = ServerTls(config.ssl, str(certificate), str(key), None if ca is None else str(ca))
        _servers[config] = found
    return found
