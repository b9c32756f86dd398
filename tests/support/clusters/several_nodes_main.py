"""The child process of `SeveralNodes`: a Ray cluster of several nodes on this machine, and the application on it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.core.config.sections import Configuration
from cluster.wire.peer_access import PeerAccess
from deploy.network.cluster_token import draw_token
from deploy.placement import Bundle, Placement, RolePlacement
from deploy.ray.application import bind
from deploy.settings import set_ray_environment
from workers.serve.configuration import load_configuration

OBJECT_STORE_BYTES = 80 * 2**20
_POLL_SECONDS = 0.25


class RunningNodes:
    """The nodes by name, and what runs on them."""

    def __init__(self, nodes: dict[str, dict[str, Any]]) -> None:
        set_ray_environment()
        self._access = PeerAccess(draw_token())
        self._cluster = Cluster()  # type: ignore[no-untyped-call]
        self._nodes = {name: self._add(options) for name, options in nodes.items()}
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def _add(self, options: dict[str, Any]) -> Any:
        return self._cluster.add_node(object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **options)

    def raylets(self) -> dict[str, int]:
        """The process ids of the nodes' raylets, which are the parents of all processes on a node."""
        return {name: node.all_processes["raylet"][0].process.pid for name, node in self._nodes.items()}

    def free_gpus(self) -> float:
        """Number of GPUs of all nodes that nobody claims."""
        return float(ray.available_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]

    def deploy(self, configuration: Configuration) -> None:
        """Deploy as on GPUs, but compute on the CPU. Every GPU is claimed by one rank or one drafter.

        Deployed again, the application replaces its replicas one by one.
        """
        target, draft = configuration.target, configuration.draft
        placement = Placement(
            target=RolePlacement(
                "target", "cpu", (Bundle(0.45, 1),) * target.tensor_parallel, 1, spans_nodes=target.span_nodes
            ),
            draft=RolePlacement("draft", "cpu", (Bundle(1.0, 1),) * draft.replicas, 1),
            coordinator=RolePlacement("coordinator", "cpu", (Bundle(0.1),), 1),
            ingress=RolePlacement("ingress", "cpu", (Bundle(0.1),), 1),
        )
        server = configuration.server
        # The nodes share one address: a proxy on each would share the port, too.
        location = {"location": "HeadOnly"}
        serve.start(http_options={"host": server.http_host, "port": server.http_port} | location)
        application = bind(configuration, placement, worker_host=None, access=self._access)
        serve.run(application, name=server.application)

    def deploy_file(self, file: str) -> dict[str, str]:
        """Deploy a configuration file of Serve, as KubeRay has it done. Return the status of each application."""
        config = ServeDeploySchema.model_validate(yaml.safe_load(Path(file).read_text("utf-8")))
        serve.start(http_options=config.http_options.model_dump() | {"location": "EveryNode"})
        _get_global_client().deploy_apps(config)
        while True:
            applications = serve.status().applications
            statuses = {name: one.status.value for name, one in applications.items()}
            if statuses and "DEPLOYING" not in statuses.values() and "NOT_STARTED" not in statuses.values():
                return {name: f"{statuses[name]} {one.message}".strip() for name, one in applications.items()}
            time.sleep(_POLL_SECONDS)

    def remove(self, name: str) -> None:
        """Kill all processes of a node."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def restart_control_store(self, pause_seconds: float) -> None:
        """Kill the control store of the head, and start it again after a pause. What it knows is in Redis."""
        self._cluster.head_node.kill_gcs_server()
        time.sleep(pause_seconds)
        self._cluster.head_node.start_gcs_server()

    def close(self) -> None:
        """Stop everything."""
        ray.shutdown()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


def main() -> None:
    """Answer every line of stdin until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other printed text out of the answers
    nodes = RunningNodes(json.loads(sys.argv[1]))
    commands: dict[str, Any] = {
        "raylets": nodes.raylets,
        "free_gpus": nodes.free_gpus,
        "deploy": lambda values: nodes.deploy(load_configuration(values)),
        "deploy_file": nodes.deploy_file,
        "remove": nodes.remove,
        "restart_control_store": nodes.restart_control_store,
    }
    try:
        for line in sys.stdin:
            command = json.loads(line)
            answer: dict[str, Any]
            try:
                answer = {"result": commands[command["name"]](*command["arguments"])}
            except Exception as error:
                answer = {"error": repr(error)}
            answers.write(f"{json.dumps(answer)}\n")
            answers.flush()
    finally:
        nodes.close()


if __name__ == "__main__":
    main()
