"""Who is warned that an API without keys is open to the network."""

from __future__ import annotations

import pytest

from cluster.core.config.server import ServerSection
from deploy.network.exposure import exposure_warning
from deploy.ray.running_serve import with_proxy_address

OPEN_PROXY = {"http_options": {"host": "0.0.0.0", "port": 8000}}
"""What `serve build` writes into a file: Serve's proxy listens on all addresses."""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_loopback_is_nobodys_business(host: str) -> None:
    assert exposure_warning(ServerSection(http_host=host, grpc_host=host), demands_keys=False) is None


def test_an_address_of_the_network_is_named_unless_keys_are_demanded() -> None:
    server = ServerSection(http_host="0.0.0.0", grpc_host="::", http_port=8123, grpc_port=9123)
    warning = exposure_warning(server, demands_keys=False)
    assert warning is not None
    assert "everybody who reaches 0.0.0.0:8123 (HTTP) or [::]:9123 (gRPC) can use this server" in warning
    assert exposure_warning(server, demands_keys=True) is None


def test_the_address_is_that_of_the_proxy_that_rays_own_commands_started() -> None:
    server = with_proxy_address(ServerSection(), OPEN_PROXY)
    warning = exposure_warning(server, demands_keys=False)
    assert warning is not None and "0.0.0.0:8000 (HTTP)" in warning


def test_what_rays_own_commands_leave_unset_is_what_serve_takes_by_itself() -> None:
    server = with_proxy_address(ServerSection(http_host="0.0.0.0", http_port=8123), {"http_options": {}})
    assert (server.http_host, server.http_port) == ("127.0.0.1", 8000)


def test_without_ray_serve_the_address_is_that_of_the_settings() -> None:
    assert with_proxy_address(ServerSection()) == ServerSection()
