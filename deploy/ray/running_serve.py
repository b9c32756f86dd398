"""What already runs in Ray Serve: its HTTP proxy, which all applications share, and their names and route prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import ray
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from cluster.core.config.server import ServerSection
from cluster.core.errors import ConfigurationError
from cluster.wire.address import http_url
from cluster.wire.tls.public_credentials import client_context
from deploy.preflight import Problem, port_problems, raise_problems
from deploy.ray.proxy import CALLBACK, CALLBACK_VARIABLE

_SECONDS = 5.0


def check_addresses(server: ServerSection) -> ServerSection:
    """Check the ports, the application's name and its route prefix. Raises `ConfigurationError`.

    Returns the settings, with the address of the HTTP proxy if one runs.
    """
    running = _details()
    if running is None:
        raise_problems(port_problems(server))
        return server
    prefixes = {name: application["route_prefix"] for name, application in running["applications"].items()}
    raise_problems(application_problems(server, prefixes))
    raise_problems(port_problems(server.model_copy(update={"http_port": 0})))
    proxy = running["http_options"]
    raise_problems(proxy_problems(server, proxy))
    return server.model_copy(update={"http_host": proxy["host"], "http_port": proxy["port"]})


def proxy_problems(server: ServerSection, proxy: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems with the options of a running HTTP proxy, which cannot be changed."""
    if bool(proxy.get("ssl_certfile")) is not (server.tls is not None):
        found = "with TLS" if proxy.get("ssl_certfile") else "without TLS"
        needed = "without TLS" if server.tls is None else "with TLS"
        yield Problem(
            "server.tls",
            f"an HTTP proxy {needed}",
            f"one {found} running",
            "set or unset server.tls, or start Ray Serve again",
        )


def check_certificates(server: ServerSection) -> None:
    """Raise `ConfigurationError` if the HTTP proxy should demand a certificate of its clients and does not.

    That is the case when its process was started without Pilotfish's callback.
    """
    if server.tls is None or server.tls.client_ca is None:
        return
    url = http_url(server.http_host, server.http_port, has_tls=True)
    context = client_context(server.tls, presents_certificate=False)
    try:
        httpx.get(f"{url}/-/healthz", timeout=_SECONDS, verify=context)
    except httpx.TransportError:
        return
    raise ConfigurationError(
        f"server.tls.client_ca: needed an HTTP proxy that demands certificates, found one at {url} that does not; "
        f"start the nodes of Ray with {CALLBACK_VARIABLE}={CALLBACK}"
    )


def application_problems(server: ServerSection, prefixes: Mapping[str, str | None]) -> Iterator[Problem]:
    """Problems with the running applications, given by their names and route prefixes."""
    if server.application in prefixes:
        yield Problem(
            "server.application",
            "a name that no application of the Ray cluster has",
            f"{server.application!r} running",
            "set it to another name, or stop the other application",
        )
    for name, prefix in prefixes.items():
        if name != server.application and prefix == server.route_prefix:
            yield Problem(
                "server.route_prefix",
                "a prefix that no application of the Ray cluster has",
                f"{prefix!r} taken by {name!r}",
                "set it to another one, as in /small",
            )


def _details() -> dict[str, Any] | None:
    """The state of Ray Serve, or `None` where it does not run."""
    if not ray.is_initialized():
        return None
    try:
        client = _get_global_client()
    except RayServeException:
        return None
    return None if client is None else dict(client.get_serve_details())
