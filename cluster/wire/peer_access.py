"""What callers present: processes of one cluster a token and, if configured, a certificate; clients an API key."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import ClassVar

import grpc

from cluster.core.config.cluster_section import TlsSection
from cluster.core.errors import ConfigurationError
from cluster.wire.tls import CertificateFiles, read_file, renewed_credentials

TOKEN_KEY = "x-pilotfish-cluster-token"  # noqa: S105 - the name of the metadata, not a secret
"""Key of the call metadata that holds the cluster token."""


Metadata = tuple[tuple[str, str], ...]

SHORTEST_TOKEN = 32
"""Fewest characters of a token. A drawn token has 64: 32 random bytes in hexadecimal."""
LONGEST_TOKEN = 512


@dataclass(frozen=True, slots=True)
class ClusterToken:
    """A secret that every process of a cluster has. It appears in no `repr` and no error."""

    text: str = field(repr=False)
    """32 to 512 printable ASCII characters without spaces."""

    def __post_init__(self) -> None:
        if not SHORTEST_TOKEN <= len(self.text) <= LONGEST_TOKEN:
            raise ConfigurationError(
                f"the cluster token: needed {SHORTEST_TOKEN} to {LONGEST_TOKEN} characters, found {len(self.text)}"
            )
        if not all("!" <= character <= "~" for character in self.text):
            raise ConfigurationError("the cluster token: needed printable ASCII characters without spaces")

    def is_equal_to(self, presented: str | bytes) -> bool:
        """Whether a caller presented this token. The time that this takes does not depend on where they differ."""
        given = presented.encode(errors="surrogateescape") if isinstance(presented, str) else presented
        return hmac.compare_digest(self.text.encode(), given)

    def api_key(self) -> str:
        """The API key with which the cluster's own processes call its public services. It does not tell the token."""
        return hmac.new(self.text.encode(), b"public services", "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """What a process presents to internal services, and what its own internal services demand.

    Without a token and TLS, services are open to everybody who reaches their port: for public services and tests.
    """

    token: ClusterToken | None = None
    """Sent with every call, and demanded of every call."""
    tls: TlsSection | None = None
    """Files of this machine. Servers read them again when they change, and clients whenever a channel opens."""

    def metadata(self) -> Metadata:
        """The metadata of every call."""
        return () if self.token is None else ((TOKEN_KEY, self.token.text),)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a server that demands a certificate of its clients; `None` without TLS.

        Changed files are in force without a restart. Raises `ConfigurationError` for files that are unusable.
        """
        if self.tls is None:
            return None
        files = CertificateFiles(self.tls.certificate, self.tls.key, self.tls.ca, is_internal=True)
        return renewed_credentials(files, files.read(), demands_certificate=True)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a client; `None` without TLS. Raises `ConfigurationError` for an unreadable file."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            read_file("cluster.tls.ca", self.tls.ca),
            read_file("cluster.tls.key", self.tls.key),
            read_file("cluster.tls.certificate", self.tls.certificate),
        )

    @property
    def server_name(self) -> str | None:
        """The name that servers' certificates must have; `None` without TLS."""
        return None if self.tls is None else self.tls.server_name


@dataclass(frozen=True, slots=True)
class PublicAccess:
    """What a client of this machine presents to public services, which it calls without TLS."""

    api_key: str | None = field(default=None, repr=False)
    """Sent with every call. It appears in no `repr`."""
    server_name: ClassVar[None] = None

    def metadata(self) -> Metadata:
        """The metadata of every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: there is no TLS."""
        return None


OPEN = PeerAccess()
"""Nothing is presented or demanded."""
