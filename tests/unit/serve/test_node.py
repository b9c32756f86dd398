"""The node that a process runs on: its ports."""

from __future__ import annotations

import socket

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
