"""Certificates, made for one test."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.core.config.cluster_section import TlsSection

NAME = "pilotfish"
_VALID = timedelta(hours=1)


class Authority:
    """An authority with a certificate of its own in `file`, which signs others."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _signed(_name("authority"), self._key, self._key, _name("authority"), is_authority=True)
        self.file = directory / "ca.crt"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[str, str]:
        """Write a certificate for `name`, localhost and 127.0.0.1, and its key. Returns both files.

        A second certificate of one name replaces the first in its files.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(_name(name), key, self._key, self._certificate.subject, is_authority=False)
        return _written(self._directory, name, certificate, key)


def make_certificate(directory: Path) -> TlsSection:
    """A self-signed certificate for the default server name, which is its own authority."""
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _signed(_name(NAME), key, key, _name(NAME), is_authority=True)
    file, key_file = _written(directory, "tls", certificate, key)
    return TlsSection(certificate=file, key=key_file, ca=file)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _signed(
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    names = [x509.DNSName(NAME), x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .sign(authority, hashes.SHA256())
    )


def _written(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[str, str]:
    file, key_file = directory / f"{name}.crt", directory / f"{name}.key"
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return str(file), str(key_file)
