"""Network addresses as text."""

from __future__ import annotations

import ipaddress
import socket

from cluster.core.config.server import ServerSection


def join_host_port(host: str, port: int) -> str:
    """`host:port` for gRPC and URLs. An IPv6 address is put in brackets, as in `[::1]:50051`."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def http_url(host: str, port: int, *, has_tls: bool = False) -> str:
    """The URL at which this machine reaches an HTTP server that listens on `host`."""
    return f"{'https' if has_tls else 'http'}://{join_host_port(reachable_host(host), port)}"


def http_api_url(server: ServerSection) -> str:
    """The URL of the HTTP API, with the application's route prefix, at which this machine reaches it."""
    url = http_url(server.http_host, server.http_port, has_tls=server.tls is not None)
    return url + server.route_prefix.rstrip("/")


def grpc_api_address(server: ServerSection) -> str:
    """The address of the gRPC API at which this machine reaches it."""
    return join_host_port(reachable_host(server.grpc_host), server.grpc_port)


def reachable_host(host: str) -> str:
    """The host at which this machine reaches a server that listens on `host`: loopback for one on all addresses.

    A server need not answer under the name `0.0.0.0` or `[::]`, and not every system can connect to them.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def socket_family(host: str) -> socket.AddressFamily:
    """The family of a socket that listens on `host`."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def is_ipv6(host: str) -> bool:
    """Whether `host` is a literal IPv6 address without brackets. Host names contain no colon."""
    return ":" in host and not host.startswith("[")
