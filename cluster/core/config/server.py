"""Settings of the public APIs, and of how many replicas answer requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.core.config.base import Choice, Port, Positive, Seconds, Section
from cluster.core.config.public_tls import PublicTlsSection


class ClientLimitsSection(Section):
    """What each client may use; a line of the API key file may say otherwise. Every ingress counts for itself.

    Clients are told apart by the names of their API keys. Without keys, nothing is limited.
    """

    requests_per_minute: Positive | None = None
    """Most requests a minute; each prompt of a request counts. Unset: no limit."""
    tokens_per_minute: Positive | None = None
    """Most tokens of prompts and answers a minute; a request that begins within it is answered whole. Unset: no
    limit."""
    concurrent_answers: Positive | None = None
    """Most answers that are generated at a time. Unset: no limit."""


Origin = Annotated[str, Field(max_length=256, pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
Host = Annotated[str, Field(max_length=256, pattern=r"^(\*|(\*\.)?[\w.:-]+)$")]


class AutoscalingSection(Section):
    """How Ray Serve changes the number of target replicas with the load."""

    max_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Most target replicas; the fewest are `target.replicas`. 0: the number does not change."""
    sequences_per_replica: Positive = 32
    """Number of waiting and running sequences for which one replica is enough."""
    kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Used share of the KV blocks for which one replica is enough."""


class ServerSection(Section):
    """Addresses and lifetime of the public APIs."""

    application: Annotated[str, Field(pattern=r"^[\w-]+$")] = "pilotfish"
    """Name of the application in Ray Serve. Applications of one Ray cluster have different names."""
    route_prefix: Annotated[str, Field(pattern=r"^/([\w.-]+(/[\w.-]+)*)?$")] = "/"
    """First part of the path of all HTTP routes. Applications of one Ray cluster have different ones."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP API binds to."""
    http_port: Port = 8000
    """Port of the HTTP API; 0 takes a free one."""
    grpc_host: str = "127.0.0.1"
    """Address that the gRPC API binds to."""
    grpc_port: Port = 9000
    """Port of the gRPC API; 0 takes a free one."""
    operations_port: Port | None = None
    """Port of the operations service (metrics, abort) on `grpc_host`; unset: `grpc_port`, which the public API has."""
    api_key_file: str | None = None
    """File with API keys, one `NAME KEY` a line, or a directory with a file per key. `PILOTFISH_API_KEYS` has further
    ones; without both, everybody may call."""
    log_format: Literal["text", "json"] = "text"
    """Form of the processes' logs: `json` writes one object per line, also for every request."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")] | None = None
    """URL of an OpenTelemetry collector that takes spans over OTLP with gRPC (`http://HOST:4317`); unset: no traces."""
    tls: PublicTlsSection | None = None
    """TLS of both public APIs; unset: no TLS."""
    page: Choice[Literal["on", "off"]] = "on"
    """Whether the HTTP API has a page for people at `/`."""
    demo: Choice[Literal["on", "off"]] = "off"
    """Whether the page may kill drafters, to show that answers go on. Where API keys are demanded, operators only."""
    client_limits: ClientLimitsSection = ClientLimitsSection()
    """Limits of each client that has an API key."""
    sharing_between_keys: Choice[Literal["off", "on"]] = "off"
    """Whether requests with different API keys share the prefix cache, and drafts from earlier texts. Then answer times
    and drafts of one client may tell what another one sent. Requests with different `cache_salt` never share."""
    cors_origins: Annotated[tuple[Origin, ...], Field(max_length=64)] = ()
    """Origins of web pages that may call the HTTP API from a browser, as `https://chat.example.com`, or `*` for all;
    unset: none."""
    allowed_hosts: Annotated[tuple[Host, ...], Field(max_length=64)] = ()
    """Names under which the HTTP API answers where no API keys are demanded, besides its addresses and names without a
    dot: `pilotfish.example.com`, `*.example.com`, or `*` for all. With API keys, it answers under any name."""
    ingress_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ingress processes. Each serves both APIs, and those on one node share the ports."""
    ingress_node_resource: str | None = None
    """Custom Ray resource of the nodes that ingress processes run on; unset: any node with enough cores."""
    start_timeout_seconds: Seconds = 600.0
    """Longest time from start to readiness, in seconds; then `serve` gives up."""
    drain_timeout_seconds: Seconds = 30.0
    """Longest time that running requests may continue after SIGTERM, in seconds."""
