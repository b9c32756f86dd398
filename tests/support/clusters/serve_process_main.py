"""The child process of `ServeProcess`. It runs commands from stdin one after another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster.core.config.sections import Configuration
from deploy.network.cluster_token import find_token
from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import Settings
from workers.serve.configuration import load_configuration


class Commands:
    """Starts, changes and stops one cluster."""

    def __init__(self, cache_directory: Path) -> None:
        self._cache_directory = cache_directory
        self._cluster: ServeCluster | None = None

    def run(self, command: str, argument: str | None) -> Configuration:
        """Run one command and return the configuration that runs afterwards. Raises the cluster's errors."""
        if command == "start":
            configuration = load_configuration(json.loads(argument or "{}"))
            token = find_token({}, configuration.cluster.token_file)
            settings = Settings(configuration, self._cache_directory, token=token)
            self._cluster = ServeCluster(settings, lambda _: None)
            self._cluster.start()
            return self._cluster.configuration
        if self._cluster is None:
            raise RuntimeError(f"{command}: no cluster was started")
        if command == "redeploy":
            self._cluster.redeploy(load_configuration(json.loads(argument or "{}")))
        else:
            {"drain": self._cluster.drain, "stop": self._cluster.stop}[command]()
        return self._cluster.configuration

    def close(self) -> None:
        """Stop the cluster if there is one."""
        if self._cluster is not None:
            self._cluster.stop()


def main() -> None:
    """Answer every line of stdin until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other printed text out of the answers
    commands = Commands(Path(sys.argv[1]))
    try:
        for line in sys.stdin:
            answer: dict[str, Any]
            try:
                answer = {"configuration": commands.run(**json.loads(line)).model_dump_json()}
            except Exception as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            answers.write(f"{json.dumps(answer)}\n")
            answers.flush()
    finally:
        commands.close()


if __name__ == "__main__":
    main()
