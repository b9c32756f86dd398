"""A Ray cluster of several nodes on this machine, in a fresh process (see `serve_process`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

import psutil

from cluster.core.config.sections import Configuration
from tests.support.clusters.json_process import JsonProcess
from tests.support.clusters.serve_process import START_SECONDS


class SeveralNodes:
    """Nodes with logical GPUs, by name. A context manager that stops everything on exit."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str] | None = None) -> None:
        ray_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
        self._process = JsonProcess(
            "tests.support.clusters.several_nodes_main",
            json.dumps(nodes),
            environment=ray_token | dict(environment or {}),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def deploy(self, configuration: Configuration) -> None:
        """Deploy the application and return when all replicas are healthy."""
        self._call("deploy", configuration.model_dump(mode="json"))

    def deploy_file(self, file: Path) -> dict[str, str]:
        """Deploy a configuration file of Serve. Return the status of each application when none is deploying."""
        statuses: dict[str, str] = self._call("deploy_file", str(file))
        return statuses

    def free_gpus(self) -> float:
        """Number of GPUs that nobody claims."""
        return float(self._call("free_gpus"))

    def remove(self, name: str) -> None:
        """Kill all processes of a node."""
        self._call("remove", name)

    def restart_control_store(self, pause_seconds: float) -> None:
        """Kill the control store of the head, and start it again after a pause."""
        self._call("restart_control_store", pause_seconds)

    def processes(self, title: str) -> dict[str, list[psutil.Process]]:
        """The processes whose title begins with `title`, by the name of their node."""
        raylets: dict[str, int] = self._call("raylets")
        return {name: _children(raylet, title) for name, raylet in raylets.items()}

    def counts(self, title: str) -> dict[str, int]:
        """Number of processes whose title begins with `title` on each node that has any."""
        return {name: len(processes) for name, processes in self.processes(title).items() if processes}

    def _call(self, name: str, *arguments: object) -> Any:
        answer = self._process.ask({"name": name, "arguments": arguments}, START_SECONDS)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


def _children(parent: int, title: str) -> list[psutil.Process]:
    """The child processes with that title. Ray sets the title of a process to the name of its actor."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith(title):
                found.append(child)
        except psutil.Error:  # the process has ended
            continue
    return found
