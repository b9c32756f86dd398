"""The node that a process runs on: its ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from workers.serve.node import free_port, reserved_port

LOOPBACK = "127.0.0.1"


def test_a_reserved_port_is_free_only_for_sockets_that_share_it() -> None:
    port = free_port(LOOPBACK)
    with reserved_port(LOOPBACK, port):
        with pytest.raises(OSError, match="in use"), socket.create_server((LOOPBACK, port), reuse_port=False):
            pass
        with (
            socket.create_server((LOOPBACK, port), reuse_port=True) as server,
            socket.create_connection((LOOPBACK, port), timeout=5.0),
        ):
            server.accept()[0].close()
    with socket.create_server((LOOPBACK, port)):
        pass


def test_a_free_port_is_none_that_the_system_gives_to_programs_which_ask_for_any() -> None:
    range_of_system = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not range_of_system.exists():
        pytest.skip("the system does not say which ports it gives out")
    first, last = map(int, range_of_system.read_text().split())
    if first < 21_000:
        pytest.skip("the system gives out nearly all ports")
    ports = [free_port(LOOPBACK) for _ in range(50)]
    assert not [port for port in ports if first <= port <= last]
    assert len(set(ports)) > 40
