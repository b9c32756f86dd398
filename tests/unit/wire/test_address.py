"""Addresses: IPv6 literals are put in brackets wherever a host and a port are joined."""

from __future__ import annotations

import socket

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.wire.address import http_url, join_host_port, reachable_host, socket_family
from cluster.wire.channel import open_channel
from cluster.wire.server import WireServer


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "joined", "family"),
    [
        ("127.0.0.1", "127.0.0.1:80", socket.AF_INET),
        ("fish.example", "fish.example:80", socket.AF_INET),
        ("::1", "[::1]:80", socket.AF_INET6),
        ("2001:db8::7", "[2001:db8::7]:80", socket.AF_INET6),
    ],
)
def test_an_ipv6_address_is_put_in_brackets(host: str, joined: str, family: socket.AddressFamily) -> None:
    assert join_host_port(host, 80) == joined
    assert http_url(host, 80) == f"http://{joined}"
    assert socket_family(host) == family


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("[::]", "http://[::1]:80"),
        ("0.0.0.0.example", "http://0.0.0.0.example:80"),
        ("192.0.2.7", "http://192.0.2.7:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_a_server_on_all_addresses_is_reached_at_loopback(host: str, url: str) -> None:
    assert http_url(host, 80) == url
    assert join_host_port(reachable_host(host), 80) == url.removeprefix("http://")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_server_listens_on_an_ipv6_address(host: str) -> None:
    async with WireServer(host, 0) as server:
        port = await server.start()
        async with open_channel(join_host_port("::1", port)) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
