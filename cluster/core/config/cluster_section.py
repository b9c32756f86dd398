"""Settings of the traffic inside the cluster: between coordinators, targets, drafters and the ingress."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.core.config.base import Choice, Seconds, Section

LEASE_SECONDS = 10.0
"""The default of `cluster.lease_seconds`."""


class TlsSection(Section):
    """Mutual TLS between the processes of the cluster. All of them have the same certificate."""

    certificate: str
    """File of the PEM certificate (chain) that every process presents."""
    key: str
    """File of the PEM key of the certificate."""
    ca: str
    """File of the PEM certificates by which every process checks the others' certificates."""
    server_name: str = "pilotfish"
    """The DNS name in the certificate. Clients check it instead of the server's address, which changes."""


class ClusterSection(Section):
    """How the processes of the cluster know each other, and how long they hold what they stored on each other."""

    token_file: str | None = None
    """File with the cluster token, which internal services demand. `PILOTFISH_CLUSTER_TOKEN` goes before it; without
    both, the token is derived from Ray's, or drawn at the start."""
    tls: TlsSection | None = None
    """Mutual TLS for internal services, in addition to the token; unset: no TLS."""
    ray_auth: Choice[Literal["token", "off"]] = "token"
    """`token`: a Ray cluster that Pilotfish joins must demand a token (RAY_AUTH_MODE=token); `off`: it may be open."""
    memory_threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Used share of the container's memory limit, or of the machine's memory without a limit, above which `serve` ends
    the largest drafter and says so, whichever program uses the memory. Without drafters it only warns. 1: it does
    nothing. When memory is used up, the kernel ends a process.
    """
    lease_seconds: Seconds = LEASE_SECONDS
    """Time without a message from a coordinator after which a worker frees what it stores for it, in seconds."""
