"""Settings of TLS for the public APIs."""

from __future__ import annotations

from pydantic import model_validator

from cluster.core.config.base import Section


class PublicTlsSection(Section):
    """TLS of the HTTP API and of the gRPC API. All files are PEM files; changed ones are read while the server runs."""

    certificate: str | None = None
    """File of the certificate (chain) that both APIs present; needed to serve."""
    key: str | None = None
    """File of the key of `certificate`."""
    client_ca: str | None = None
    """File of certificates by which those of clients are checked; unset: no certificate is demanded of clients."""
    ca: str | None = None
    """File of certificates by which Pilotfish's own commands check servers; unset: `certificate`, else the system's."""
    client_certificate: str | None = None
    """File of the certificate that Pilotfish's own commands present; needed by them with `client_ca`."""
    client_key: str | None = None
    """File of the key of `client_certificate`."""

    @model_validator(mode="after")
    def _check(self) -> PublicTlsSection:
        for certificate, key in (("certificate", "key"), ("client_certificate", "client_key")):
            if (getattr(self, certificate) is None) != (getattr(self, key) is None):
                raise ValueError(f"{certificate} and {key} must be set together")
        return self

    @property
    def pair(self) -> tuple[str, str] | None:
        """The files of certificate and key of a server; `None` in the settings of a client."""
        return None if self.certificate is None or self.key is None else (self.certificate, self.key)

    @property
    def client_pair(self) -> tuple[str, str] | None:
        """The files of certificate and key that own commands present; `None` if they present none."""
        if self.client_certificate is None or self.client_key is None:
            return None
        return self.client_certificate, self.client_key

    @property
    def trusted(self) -> str | None:
        """The file by which own commands check the server; `None` takes the system's certificates."""
        return self.ca or self.certificate
