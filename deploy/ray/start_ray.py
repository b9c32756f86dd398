"""Starts Ray on this machine, or joins a running Ray cluster. Both demand Ray's token of their callers.

On one machine, Ray listens on loopback only. Ray allows that on macOS and Windows alone, and reads the variable that
turns it on when it is imported, as it does with the mode of authentication. Both are therefore set in the imported
modules, too.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.node import Node
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import Config  # type: ignore[attr-defined]  # compiled
from ray.exceptions import AuthenticationError

from cluster.core.errors import ConfigurationError
from deploy.network.probe import RAY_METHOD, Demand, ask
from deploy.placement import Resources
from deploy.settings import set_ray_environment
from workers.serve.node import OOM_SCORE, in_background

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Variable that names what Serve calls in the processes of its HTTP proxies."""
CALLBACK = "deploy.ray.proxy:middlewares"
CONTROLLER_CALLBACK_VARIABLE = "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"
"""Variable that names what Serve calls in the process of its controller."""
CONTROLLER_CALLBACK = "deploy.ray.controller:started"

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 96 * 2**20
"""Size of Ray's object store. It only holds configurations."""
_TOKEN_BYTES = 32
_UNUSED = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
}
"""Variables that turn off or slow down what Ray reports of itself. Nobody reads it on a single machine, and its
processes share the cores of the target."""
_PLACEMENT = {
    "RAY_gcs_create_placement_group_retry_min_interval_ms": "50",
    "RAY_gcs_create_placement_group_retry_max_interval_ms": "100",
}
"""Variables with which Ray soon tries again to place a replica that must wait until those of a killed one are freed."""
_TOKEN_SOURCES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_CONNECT_SECONDS = 10.0
_LONGEST_REASON = 300


def start_local_ray(resources: Resources) -> None:
    """Start Ray on this machine, without its API server (its dashboard and usage reports), metrics and worker logs.

    Ray's memory monitor is off: it may kill all processes of the cluster at once, Serve's controller too. See
    `deploy.ray.memory_watch`. Ray's token is drawn, unless the environment has one. Raises `ConfigurationError` if the
    environment turns authentication off.
    """
    set_ray_environment()
    for variable, value in (_UNUSED | _PLACEMENT).items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("RAY_worker_oom_score_adjustment", str(OOM_SCORE))
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)  # inherited by the processes of Serve's proxies
    os.environ.setdefault(CONTROLLER_CALLBACK_VARIABLE, CONTROLLER_CALLBACK)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # inherited by all processes of Ray
    ray_constants.ENABLE_RAY_CLUSTER = False
    if not any(os.environ.get(source) for source in _TOKEN_SOURCES):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(_TOKEN_BYTES)
    _enable_authentication()
    _log_messages_of_ray()
    with _without_reports(), _with_handler_of_caller(), in_background():
        ray.init(
            address="local",
            num_cpus=int(resources.cpus),
            num_gpus=resources.gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    check_ray_authentication()


def _log_messages_of_ray() -> None:
    """Make Ray log what it tells this process, such as the end of a worker, in one line. Ray prints paragraphs."""

    def log(data: dict[str, Any], ignore_prefix: bool = False) -> None:  # noqa: ARG001 - the signature of Ray's function
        text = "\n".join(data.get("lines", ())).strip()
        if text:
            logger.warning("Ray: %s", text.splitlines()[0])

    ray_worker.print_to_stdstream = log


@contextmanager
def _without_reports() -> Iterator[None]:
    """Inside, Ray starts without the processes that a single machine does not need.

    One publishes worker logs to drivers (`ray start` has an option for it; `ray.init` has none), one starts further
    nodes, and one is the API server, which `ray.init` starts and waits for even without a dashboard, for usage reports.
    """
    names = ("start_log_monitor", "start_monitor", "start_api_server")
    kept = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


@contextmanager
def _with_handler_of_caller() -> Iterator[None]:
    """The caller's handler of SIGTERM, if there is one, stays: Ray's ends the process with status 15."""
    handler, set_handler = signal.getsignal(signal.SIGTERM), ray_utils.set_sigterm_handler
    if handler in (signal.SIG_DFL, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    ray_utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_handler
        signal.signal(signal.SIGTERM, handler)  # Ray's compiled part has replaced it, too


def join_ray(address: str, *, demands_token: bool) -> None:
    """Join the Ray cluster at `address`: `HOST:PORT`, or `auto` for that of `RAY_ADDRESS` or of this machine.

    With `demands_token`, it must demand its token. Raises `ConfigurationError` if there is no Ray cluster, or if it
    refuses this process, or is open.
    """
    if demands_token:
        _enable_authentication()
    _log_messages_of_ray()
    try:
        if address == "auto":
            variable = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
            address = variable or canonicalize_bootstrap_address(address) or address
        if "://" not in address and (found := canonicalize_bootstrap_address(address)):
            _check_running(found)
        with _with_handler_of_caller():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"Ray at {address} refuses this process ({reason}); set RAY_AUTH_TOKEN_PATH to the file with its token"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())[:_LONGEST_REASON]
        raise ConfigurationError(
            f"PILOTFISH_RAY_ADDRESS: needed HOST:PORT of a running Ray cluster, found {address}: {reason}"
        ) from None
    if demands_token:
        check_ray_authentication()


def _check_running(address: str) -> None:
    """Raise `OSError` if Ray does not answer at `HOST:PORT` for some seconds.

    Ray itself tries for a minute where nothing listens, and for many where another service accepts its connections.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            if _has_tls() or ask(host, int(port), RAY_METHOD, seconds=_CONNECT_SECONDS) is not Demand.UNKNOWN:
                return
            raise OSError("what listens there does not answer as Ray's control service (GCS)")
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def _has_tls() -> bool:
    """Whether Ray's processes encrypt what they send each other, so that they cannot be asked without a certificate."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def check_ray_authentication() -> None:
    """Raise `ConfigurationError` if the Ray cluster of this process serves callers without its token."""
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    if ask(host.strip("[]"), int(port), RAY_METHOD, seconds=_CONNECT_SECONDS) is Demand.NOTHING:
        raise ConfigurationError(
            f"Ray at {address}: needed token authentication, found none; start all its nodes with RAY_AUTH_MODE=token, "
            "or set cluster.ray_auth=off to trust everybody who reaches them"
        )


def _enable_authentication() -> None:
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ConfigurationError(f"RAY_AUTH_MODE: needed token, or unset; found {mode}")
    Config.initialize("")  # reads the environment again
