"""A cluster under Ray Serve that runs in a fresh process.

Ray forks its servers from the process that calls `ray.init`. A forked child of a pytest process may hang because of
live gRPC threads, so tests run Ray in a process without such threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from cluster.core import errors
from cluster.core.config.sections import Configuration
from cluster.wire.address import http_url, join_host_port
from deploy.models import served_name
from tests.support.clusters.json_process import JsonProcess
from tests.support.clusters.live_cluster import Server
from workers.serve.configuration import load_configuration

START_SECONDS = 300.0
"""How long a start or a redeployment may take on a busy machine."""


class ServeProcess:
    """Runs `ServeCluster` in a separate process. A context manager that stops everything on exit.

    Every method raises the `PilotfishError` that the cluster's own method raises.
    """

    def __init__(self, cache_directory: Path) -> None:
        self._process = JsonProcess("tests.support.clusters.serve_process_main", str(cache_directory))
        self._configuration: Configuration | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the cluster and end the process."""
        self._process.stop()

    @property
    def configuration(self) -> Configuration | None:
        """The running configuration with its actual ports, or `None` if no cluster runs."""
        return self._configuration

    @property
    def server(self) -> Server:
        """The addresses of the cluster. Raises `RuntimeError` if no cluster runs."""
        if self._configuration is None:
            raise RuntimeError("no cluster is running")
        server = self._configuration.server
        return Server(
            join_host_port(server.grpc_host, server.grpc_port),
            http_url(server.http_host, server.http_port),
            served_name(self._configuration),
        )

    def start(self, configuration: Configuration) -> Server:
        """Start Ray, Serve and the cluster."""
        return self._deploy("start", configuration)

    def redeploy(self, configuration: Configuration) -> Server:
        """Replace the running configuration and keep the ports."""
        return self._deploy("redeploy", configuration)

    def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._call("drain")

    def stop(self) -> None:
        """Stop the cluster, Serve and Ray. The process stays and can start another cluster."""
        self._call("stop")
        self._configuration = None

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """The cluster's process, and all that it has started."""
        own = psutil.Process(self._process.pid)
        return (own, *own.children(recursive=True))

    def descendants(self, title: str) -> list[psutil.Process]:
        """Descendants of the cluster's process with `title` in their command line."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [child for child in children if title in _command_line(child)]

    def _deploy(self, command: str, configuration: Configuration) -> Server:
        self._configuration = None
        answer = self._call(command, configuration.model_dump_json())
        self._configuration = load_configuration(json.loads(answer["configuration"]))
        return self.server

    def _call(self, command: str, argument: str | None = None) -> dict[str, Any]:
        answer = self._process.ask({"command": command, "argument": argument}, START_SECONDS)
        if "error" in answer:
            raise getattr(errors, answer["error"], RuntimeError)(answer["message"])
        return answer


Deploy = Callable[[Configuration], ServeProcess]
"""The fixture `deploy`: runs a configuration and returns the process that runs it."""


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has ended
        return ""
