"""The Serve configuration that the Helm chart renders runs on Ray nodes like those of the chart's pods.

The chart's own test, which `helm test` runs in a pod, finds nothing wrong with both APIs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart.rendering import CHART, Rendered, ci_values, render
from tests.support.clusters.several_nodes import SeveralNodes
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

CHECK_SECONDS = 120.0
LOOPBACK = "127.0.0.1"
REPLICA = "ray::ServeReplica:pilotfish:"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=1024))
    return tiny_tokenizer.byte_level(directory)


def nodes(rendered: Rendered) -> dict[str, dict[str, Any]]:
    """What the pods' Ray nodes offer: one pod of each group, and the head."""
    head = {"num_cpus": int(rendered.cluster["headGroupSpec"]["rayStartParams"]["num-cpus"])}
    groups = {
        group["groupName"]: {
            "num_cpus": int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]),
            "resources": {name: float(amount) for name, amount in group["resources"].items()},
        }
        for group in rendered.cluster["workerGroupSpecs"]
    }
    return {"head": head} | groups


def test_each_role_runs_in_its_group_and_both_apis_answer(model: Path, tmp_path: Path) -> None:
    http_port, grpc_port = free_port(LOOPBACK), free_port(LOOPBACK)
    values = ci_values("cpu-smoke")
    values["settings"]["target"]["path"] = str(model)
    values["settings"] |= {"server": {"grpc_port": grpc_port}, "draft": {"placement": "drafter"}}
    rendered = render(values)
    config = rendered.serve_config
    config["http_options"]["port"] = http_port  # a pod has port 8000 to itself, this machine may not
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")

    with SeveralNodes(nodes(rendered)) as cluster:
        assert cluster.deploy_file(file) == {"pilotfish": "RUNNING"}
        places = {role: cluster.counts(f"{REPLICA}{role}") for role in ("Target", "Draft", "Ingress")}
        outcome = check(f"http://{LOOPBACK}:{http_port}", f"{LOOPBACK}:{grpc_port}")
        wrong = check(f"http://{LOOPBACK}:{http_port}/nowhere", f"{LOOPBACK}:{grpc_port}")

    assert places == {"Target": {"target": 1}, "Draft": {"ingress": 1}, "Ingress": {"ingress": 1}}
    assert outcome.returncode == 0, outcome.stderr
    assert wrong.returncode != 0 and "404" in wrong.stderr


def check(url: str, address: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the chart's test pod."""
    script = CHART / "files" / "check_apis.py"
    environment = os.environ | {"HTTP_URL": url, "GRPC_ADDRESS": address}
    return subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
    )
