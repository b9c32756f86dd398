"""What runs in Ray Serve: its HTTP proxy, which all applications share, their names and route prefixes, their states.

Importing this imports Serve, which takes a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.core.config.server import ServerSection
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from cluster.ingress.connections.tls import tls_options
from cluster.wire.address import http_url
from cluster.wire.tls import client_context
from deploy.preflight import Problem, port_problems, raise_problems
from deploy.ray.start_ray import CALLBACK, CALLBACK_VARIABLE

logger = logging.getLogger(__name__)

_SECONDS = 5.0
_POLL_SECONDS = 0.25
_RETRIED = "A replica failed to start with exception"
"""What Serve says of a deployment whose replica it starts again."""
_LONGEST_REASON = 2000
"""Longest text of another process that an error repeats, in characters."""


def run_application(
    application: Application, server: ServerSection, report: Callable[[str], None], deadline: float
) -> None:
    """Start Serve, if it does not run, deploy an application, and return when all its deployments are healthy.

    Passes the state to `report`, and logs the reason of each start that fails. Raises `WorkerUnavailable` if a
    deployment fails, or after `deadline` (of `time.monotonic`).
    """
    report("starting Ray Serve")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": server.http_host, "port": server.http_port, **tls_options(server.tls)})
    name = server.application
    target = serve.RunTarget(application, name=name, route_prefix=server.route_prefix)
    serve.run_many([target], wait_for_applications_running=False)  # Serve itself would look once per second
    failures = {""}
    while True:
        status = serve.status().applications.get(name)
        if status is not None and status.status == ApplicationStatus.RUNNING:
            return
        if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
            raise WorkerUnavailable(_reason(status))
        if status is not None and (failed := _failed_start(status)) not in failures:
            failures.add(failed)
            logger.warning("a replica of the %s", failed)
        report(_progress(status))
        if time.monotonic() > deadline:
            failed = "" if status is None else _failed_start(status)
            raise WorkerUnavailable(
                f"not ready after {server.start_timeout_seconds:g} s ({failed or _progress(status)}); raise "
                "server.start_timeout_seconds if loading takes longer"
            )
        time.sleep(_POLL_SECONDS)


def _progress(application: ApplicationStatusOverview | None) -> str:
    """The state of the application's deployments, in one line."""
    if application is None or not application.deployments:
        return "placing the workers"
    loaded = [name.lower() for name, entry in application.deployments.items() if entry.status == "HEALTHY"]
    awaited = [name.lower() for name, entry in application.deployments.items() if entry.status != "HEALTHY"]
    return f"loading and warming up: {', '.join(awaited) or 'done'}" + (
        f" (ready: {', '.join(loaded)})" if loaded else ""
    )


def _reason(application: ApplicationStatusOverview) -> str:
    """Why a deployment failed: the last line of its traceback, or Serve's message if there is none."""
    return _failed_start(application) or application.message[:_LONGEST_REASON]


def _failed_start(application: ApplicationStatusOverview) -> str:
    """The reason of the last failed start of a deployment that is not healthy; empty if no start failed."""
    for name, entry in application.deployments.items():
        lines = [line.strip() for line in entry.message.splitlines() if line.strip()]
        if lines and (entry.status == "DEPLOY_FAILED" or _RETRIED in lines[0]):
            # The last line of a traceback is "package.module.Error: message".
            reason = lines[-1].partition(": ")[2] or lines[-1]
            return f"{name.lower()} did not start: {reason[:_LONGEST_REASON]}"
    return ""


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
    raise_problems(proxy_problems(server, running["http_options"]))
    return with_proxy_address(server, running)


def has_replicas() -> bool:
    """Whether replicas run in Ray Serve, of whichever application."""
    running = _details()
    return running is not None and any(one["deployments"] for one in running["applications"].values())


def with_proxy_address(server: ServerSection, running: Mapping[str, Any] | None = None) -> ServerSection:
    """The settings, with the address of the HTTP proxy that runs, which Ray's own commands choose.

    `running` is the state of Ray Serve; unset, it is asked for.
    """
    found = running or _details()
    if found is None:
        return server
    # Serve does not name what nobody has set, as `serve run` sets nothing.
    proxy = HTTPOptions(**{name: value for name, value in found["http_options"].items() if name in ("host", "port")})
    return server.model_copy(update={"http_host": proxy.host, "http_port": proxy.port})


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
        httpx.get(f"{url}/-/healthz", timeout=_SECONDS, verify=context, trust_env=False)
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
