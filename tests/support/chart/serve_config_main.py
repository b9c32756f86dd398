"""A process that starts Ray on this machine and deploys a Serve configuration file, as KubeRay's operator has it done.

It writes one line of JSON when the applications run or have failed, and stops everything when its stdin is closed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve._private.api import serve_start
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ServeDeploySchema

from deploy.ray.proxy import CALLBACK, CALLBACK_VARIABLE
from deploy.settings import set_ray_environment

DEPLOY_SECONDS = 240.0


def deploy(file: Path) -> dict[str, str]:
    """Deploy the configuration, and return the status of each application."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text("utf-8")))
    client = serve_start(HTTPOptions(location=ProxyLocation.EveryNode, **config.http_options.model_dump()))
    client.deploy_apps(config)
    until = time.monotonic() + DEPLOY_SECONDS
    while time.monotonic() < until:
        applications = serve.status().applications
        found = {name: f"{one.status.value} {one.message}".strip() for name, one in applications.items()}
        if found and all(one.status in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY") for one in applications.values()):
            return found
        time.sleep(0.25)
    return {"error": f"not running after {DEPLOY_SECONDS:g} s"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other printed text out of the answers
    set_ray_environment()
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        object_store_memory=96 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        answers.write(f"{json.dumps(deploy(Path(sys.argv[1])))}\n")
        answers.flush()
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
