"""A client of the public gRPC API that speaks TLS, as clients outside of the cluster do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from cluster.core.config.public_tls import PublicTlsSection
from cluster.wire.peer_access import Metadata


@dataclass(frozen=True)
class TlsAccess:
    """Presents an API key, and the certificate of the settings if they have one. It has the interface of an access."""

    tls: PublicTlsSection
    api_key: str = ""
    server_name: None = None

    def metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        trusted = None if self.tls.trusted is None else Path(self.tls.trusted).read_bytes()
        if self.tls.client_pair is None:
            return grpc.ssl_channel_credentials(trusted)
        certificate, key = self.tls.client_pair
        return grpc.ssl_channel_credentials(trusted, Path(key).read_bytes(), Path(certificate).read_bytes())
