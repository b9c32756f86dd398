"""How commands that call the HTTP API of a server check its certificate."""

from __future__ import annotations

import ssl
from typing import Annotated

import typer

from cluster.core.config.public_tls import PublicTlsSection
from cluster.wire.tls import client_context

CacertOption = Annotated[
    str | None,
    typer.Option(
        "--cacert",
        metavar="FILE",
        help="PEM file of certificates by which an https server is checked. Unset: server.tls.ca, or the system's.",
    ),
]


def verification(tls: PublicTlsSection | None, cacert: str | None = None, *, is_own: bool = False) -> ssl.SSLContext:
    """Return the TLS of a client: what it trusts, `cacert` above all, and the certificate that it presents.

    The server's name is checked, unless the server `is_own`: then it listens at an address of this machine. Raises
    `ConfigurationError`.
    """
    tls = tls or PublicTlsSection()
    if cacert is not None:
        tls = tls.model_copy(update={"ca": cacert})
    return client_context(tls, checks_name=not is_own)
