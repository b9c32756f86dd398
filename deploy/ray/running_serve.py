"""What already runs in Ray Serve: its HTTP proxy, which all applications share, and their names and route prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from cluster.core.config.server import ServerSection
from deploy.preflight import Problem, port_problems, raise_problems


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
    return server.model_copy(update={"http_host": proxy["host"], "http_port": proxy["port"]})


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
