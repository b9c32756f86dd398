"""Whether the public APIs are open to everybody on the network."""

from __future__ import annotations

import ipaddress

from cluster.core.config.server import ServerSection
from cluster.wire.address import join_host_port


def exposure_warning(server: ServerSection, *, demands_keys: bool) -> str | None:
    """Return a warning if an API listens beyond this machine and demands no API key; otherwise `None`."""
    if demands_keys:
        return None
    doors = (("HTTP", server.http_host, server.http_port), ("gRPC", server.grpc_host, server.grpc_port))
    reachable = [f"{join_host_port(host, port)} ({name})" for name, host, port in doors if not is_loopback(host)]
    if not reachable:
        return None
    return (
        f"WARNING: everybody who reaches {' or '.join(reachable)} can use this server without an API key. "
        "Set server.api_key_file or PILOTFISH_API_KEYS."
    )


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of a server that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
