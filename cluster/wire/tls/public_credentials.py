"""Credentials for the public APIs: of the gRPC server, of gRPC clients, and of HTTP clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.errors import ConfigurationError
from cluster.wire.tls.certificate_files import CertificateFiles, Certificates


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
    files, first = server_files(tls)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        found = files.changed()
        return None if found is None else _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        changed,  # type: ignore[arg-type]  # `None` leaves the certificate as it is
        require_client_authentication=tls.client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificates.client_ca)


def channel_credentials(tls: PublicTlsSection) -> grpc.ChannelCredentials:
    """Return credentials of a gRPC client. Raises `ConfigurationError` for an unreadable file."""
    trusted = None if tls.trusted is None else _read("ca" if tls.ca else "certificate", tls.trusted)
    if tls.client_pair is None:
        return grpc.ssl_channel_credentials(trusted)
    certificate, key = tls.client_pair
    return grpc.ssl_channel_credentials(trusted, _read("client_key", key), _read("client_certificate", certificate))


def client_context(
    tls: PublicTlsSection, *, presents_certificate: bool = True, checks_name: bool = False
) -> ssl.SSLContext:
    """Return the TLS of an HTTP client.

    The server's certificate is checked. Its name need not be, where the server listens at an address of this machine.
    Raises `ConfigurationError`.
    """
    trusted = None if tls.trusted is None else Path(tls.trusted).expanduser()
    try:
        context = ssl.create_default_context(cafile=trusted)
    except (OSError, ValueError) as error:
        name = "ca" if tls.ca else "certificate"
        raise ConfigurationError(f"server.tls.{name}: needed a readable PEM file, found {trusted}: {error}") from None
    context.check_hostname = checks_name
    try:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # `certificate` need not be an authority's
        if presents_certificate and tls.client_pair is not None:
            context.load_cert_chain(*tls.client_pair)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"server.tls: needed readable PEM files, found {error}") from None
    return context


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigurationError(f"server.tls.{name}: needed a readable file, found {file}: {error.strerror}") from None
