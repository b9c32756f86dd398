"""Starts, changes and stops the cluster under Ray Serve."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Self

import httpx
import psutil
import ray
from ray.exceptions import RayError

from cluster.core.config.sections import Configuration
from cluster.core.config.server import ServerSection
from cluster.core.errors import WorkerUnavailable
from cluster.wire.address import grpc_api_address, http_api_url
from cluster.wire.tls import client_context
from deploy.models import ReportProgress, resolve_models, served_name, with_served_name
from deploy.network.listeners import RAY_PROGRAMS
from deploy.placement import Placement, Resources, plan
from deploy.preflight import capacity_problems, model_problems, port_problems, raise_problems
from deploy.ray.directory import drain
from deploy.ray.log_stream import LogStream
from deploy.ray.node_models import check_models, on_planned_device
from deploy.ray.nodes import cluster_nodes, without_claims
from deploy.ray.start_ray import join_ray, start_local_ray
from deploy.settings import Settings
from workers.serve.logs import sockets_directory
from workers.serve.node import free_port, reserved_port
from workers.serve.rank_actors import FirstRank
from workers.serve.rank_placement import WaitingRank, waits_again

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_LAST_ERRORS_SECONDS = 1.2
"""How long answers may take to end with an error when everything stops at once."""
_DELIVERY_SECONDS = 0.2
"""How long ingresses may take to send these errors to their clients."""
_LONGEST_REASON = 2000


class ServeCluster:
    """A cluster that runs from `start()` to `stop()`. Also a context manager.

    Joins the Ray cluster that the settings name, or starts one on this machine and stops it again. `start` and
    `redeploy` pass the stage that they have reached to `report`.
    """

    def __init__(self, settings: Settings, report: ReportProgress, log: LogStream | None = None) -> None:
        """`log` collects the lines of all processes on this machine, if this starts Ray; they must be JSON."""
        self._settings = settings
        self._log = log
        self._configuration = with_ports(settings.configuration)
        self._report = report
        self._owns_ray = settings.ray_address is None
        self._nodes: tuple[Resources, ...] = ()
        self._is_lossless = True
        self._is_deployed = False
        self._waiting_rank: WaitingRank | None = None
        self._ray_processes: tuple[psutil.Process, ...] = ()
        """Processes of the Ray that this object has started. The server ends when one of them is gone."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def configuration(self) -> Configuration:
        """The running configuration, with the ports that were chosen."""
        return self._configuration

    @property
    def is_lossless(self) -> bool:
        """Whether the running target generates exactly what the model alone would. The first answer reports it."""
        return self._is_lossless

    @property
    def application(self) -> str:
        """The name of the Serve application."""
        return self._configuration.server.application

    @property
    def http_url(self) -> str:
        """The URL of the HTTP API, with the application's route prefix."""
        return http_api_url(self._configuration.server)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of requests that this process itself sends to the HTTP API."""
        return {"authorization": f"Bearer {self._settings.token.api_key()}"}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS of requests that this process itself sends; `None` without TLS. Raises `ConfigurationError`."""
        tls = self._configuration.server.tls
        return None if tls is None else client_context(tls)

    @property
    def grpc_address(self) -> str:
        """The address at which this machine reaches the gRPC API."""
        return grpc_api_address(self._configuration.server)

    def start(self) -> None:
        """Return once requests are accepted. Raises `ConfigurationError`, `ModelLoadError`, `WorkerUnavailable`."""
        configuration, server = self._configuration, self._configuration.server
        try:
            if self._settings.ray_address is not None:
                self._report(f"joining Ray at {self._settings.ray_address}")
                join_ray(self._settings.ray_address, demands_token=configuration.cluster.ray_auth == "token")
            self._configuration = configuration.model_copy(update={"server": _checked(server)})
            self._report("reading the resources of the machine")
            self._nodes = cluster_nodes()
            raise_problems(capacity_problems(plan(configuration, self._nodes), without_claims(self._nodes)))
            with self._kept_port():
                self._deploy()
        except BaseException:
            self.stop()
            raise

    def redeploy(self, configuration: Configuration) -> None:
        """Replace the running configuration and keep the ports. Raises the errors of `start`."""
        from ray import serve

        self._report("stopping the running application")
        serve.delete(self.application)
        self._end_waiting_rank()
        self._is_deployed = False
        self._configuration = configuration.model_copy(update={"server": self._configuration.server})
        with self._kept_port():
            self._deploy()

    def drain(self) -> None:
        """Refuse new requests and wait for the running ones, up to `server.drain_timeout_seconds`."""
        self._drain(self._configuration.server.drain_timeout_seconds)

    def stop(self) -> None:
        """Stop everything that `start` started. Stopping twice is harmless."""
        if not ray.is_initialized():
            return
        self._report("stopping")
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            if self._is_deployed:
                self._drain(0.0)
                # Deleted replicas release their resources. Serve's own actors end with Ray.
                _in_thread(lambda: serve.delete(self.application)).result(_STOP_SECONDS)
                self._is_deployed = False
        except TimeoutError:
            logger.warning("the application did not stop within %g s; its processes end with Ray", _STOP_SECONDS)
        except (RayError, RayServeException) as error:
            logger.warning("the application did not stop: %s", str(error) or type(error).__name__)
        self._end_waiting_rank()
        ray.shutdown()

    def stop_at_once(self) -> None:
        """End running answers with an error and kill the processes of this machine's Ray, within two seconds.

        In a Ray cluster that was joined, its application is deleted without waiting for it. Nothing can follow.
        """
        if not ray.is_initialized():
            return
        from ray import serve

        if self._waiting_rank is not None:
            self._waiting_rank.cancel()
        if self._is_deployed:  # before that, another application of a joined cluster may have the name
            with suppress(RayError, TimeoutError):
                _in_thread(lambda: drain(self.application, 0.0)).result(_LAST_ERRORS_SECONDS)
                time.sleep(_DELIVERY_SECONDS)
        if not self._owns_ray:
            with suppress(Exception):  # nobody is left to hear of it
                if self._is_deployed:
                    _in_thread(lambda: serve.delete(self.application, _blocking=False)).result(_LAST_ERRORS_SECONDS)
            return
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()

    def find_loss(self) -> str | None:
        """Say which process of the Ray that `start` started has ended; `None` if all run, or if others started Ray."""
        for process in self._ray_processes:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"Ray has ended: its process {process.pid} is gone; /tmp/ray/session_latest/logs says why"
        return None

    def report_to(self, report: ReportProgress) -> None:
        """Pass the stages that `start` and `redeploy` reach to `report` from now on."""
        self._report = report

    def _end_waiting_rank(self) -> None:
        waiting, self._waiting_rank = self._waiting_rank, None
        if waiting is not None:
            waiting.stop()

    def _drain(self, seconds: float) -> None:
        try:
            drain(self.application, seconds)
        except (RayError, TimeoutError) as error:
            logger.warning("the drain ended early: %s", str(error) or type(error).__name__)

    def _kept_port(self) -> AbstractContextManager[None]:
        """Keep the port of the gRPC API from other programs until the ingress, which shares it, listens there."""
        server = self._configuration.server
        return reserved_port(server.grpc_host, server.grpc_port) if self._owns_ray else nullcontext()

    def _deploy(self) -> None:
        """Check that the models fit, run the application and wait until it is ready."""
        configuration, placement = self._with_models()
        if not ray.is_initialized():
            self._report("starting Ray")
            start_local_ray(self._nodes[0])
            self._ray_processes = _ray_processes()
            directory = sockets_directory()
            if self._log is not None and directory is not None:
                self._log.collect(directory)
        if self._owns_ray and placement.target.device == "cpu":
            self._waiting_rank = WaitingRank(FirstRank, self.application, placement.target.environment)
            self._waiting_rank.start(again=waits_again(configuration.target, placement.target.device))
        server = configuration.server
        # Importing Serve takes a second, in which the processes of Ray start.
        from deploy.ray.application import bind
        from deploy.ray.running_serve import run_application

        worker_host, settings = LOOPBACK if self._owns_ray else None, self._settings
        application = bind(configuration, placement, worker_host, settings.access, settings.api_keys)
        deadline = time.monotonic() + server.start_timeout_seconds
        self._is_deployed = True
        run_application(application, server, self._report, deadline)
        self._wait_until_ready(deadline)
        self._warm_up(served_name(configuration), deadline)

    def _with_models(self) -> tuple[Configuration, Placement]:
        """The configuration and its placement, after a check of the models. On one machine they are resolved once."""
        if not self._owns_ray:
            configuration = with_served_name(self._configuration)
            placement = plan(configuration, self._nodes)
            self._report(f"finding {configuration.target.path} on a node")
            check_models(configuration, placement, self._nodes)
            return configuration, placement
        found = on_planned_device(self._configuration, self._nodes)
        models = resolve_models(found, self._settings.cache_directory, self._report)
        placement = plan(models.configuration, self._nodes)
        raise_problems(model_problems(models.configuration, placement, self._nodes, models.target, models.draft))
        return models.configuration, placement

    def _wait_until_ready(self, deadline: float) -> None:
        from deploy.ray.running_serve import check_certificates

        self._report("waiting for the coordinator to connect to the target")
        reason = ""
        # A proxy that the environment names cannot reach a server of this machine.
        with httpx.Client(timeout=5.0, verify=self.tls or True, trust_env=False) as client:
            while time.monotonic() < deadline:
                try:
                    if client.get(f"{self.http_url}/ready").status_code == httpx.codes.OK:
                        check_certificates(self._configuration.server)
                        return
                    reason = ""
                except httpx.TransportError as error:
                    reason = f" ({str(error) or type(error).__name__})"
                time.sleep(_POLL_SECONDS)
        raise WorkerUnavailable(
            f"{self.http_url}/ready did not answer 200 in time{reason}; see /tmp/ray/session_latest/logs"
        )

    def _warm_up(self, model: str, deadline: float) -> None:
        """Send one small request, so that the first client sees no start-up latency. Raises if it fails."""
        self._report("warming up")
        body = {"model": model, "prompt": "The", "max_tokens": 4}
        try:
            response = httpx.post(
                f"{self.http_url}/v1/completions",
                json=body,
                headers=self.headers,
                timeout=deadline - time.monotonic(),
                verify=self.tls or True,
                trust_env=False,
            )
        except httpx.TransportError as error:
            raise WorkerUnavailable(f"the connection of the first request was lost: {error!r}") from None
        if response.status_code != httpx.codes.OK:
            raise WorkerUnavailable(
                f"the first request failed: {response.status_code} {response.text[:_LONGEST_REASON]}"
            )
        self._is_lossless = bool(response.json()["lossless"])


def with_ports(configuration: Configuration) -> Configuration:
    """The configuration with free ports in place of 0: Serve's proxy needs one, and clients must know it."""
    server = configuration.server
    ports = {
        "http_port": server.http_port or free_port(server.http_host),
        "grpc_port": server.grpc_port or free_port(server.grpc_host),
    }
    return configuration.model_copy(update={"server": server.model_copy(update=ports)})


def _checked(server: ServerSection) -> ServerSection:
    """The settings after a check of their addresses, with that of the HTTP proxy if one runs already."""
    if not ray.is_initialized():
        raise_problems(port_problems(server))
        return server
    from deploy.ray.running_serve import check_addresses

    return check_addresses(server)


def _ray_processes() -> tuple[psutil.Process, ...]:
    """The processes of Ray that this process has started, and without which no other one of Ray works."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() in RAY_PROGRAMS:
                found.append(child)
    return tuple(found)


def _in_thread(function: Callable[[], object]) -> Future[None]:
    """Run a blocking function in a daemon thread, so that a signal can interrupt the main thread."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="serve-run", daemon=True).start()
    return outcome
