"""The Serve configuration that the Helm chart renders runs on Ray nodes like those of the chart's pods.

The chart's own test, which `helm test` runs in a pod, finds nothing wrong with both APIs. Ray's control store (GCS)
keeps its state in Redis where this machine has it, and restarts on the head while clients stream: no token passes it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from cluster.core.request import SamplingParameters
from tests.support.chart.rendering import CHART, Rendered, ci_values, render
from tests.support.clusters.live_cluster import RequestCase, Server, tokens_grpc, tokens_http
from tests.support.clusters.redis_server import LOOPBACK, PROGRAM, redis_server
from tests.support.clusters.several_nodes import SeveralNodes
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.plain_generation import write_alone
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

CHECK_SECONDS = 120.0
REPLICA = "ray::ServeReplica:pilotfish:"
CASE = RequestCase(tuple(range(40, 60)), max_tokens=150, temperature=0.9, seed=7)
OUTAGE_SECONDS = 10.0
AFTERWARDS_SECONDS = 5.0


@dataclass(frozen=True)
class Deployed:
    """The nodes on which a rendered configuration is deployed."""

    cluster: SeveralNodes
    file: Path
    server: Server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
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


@pytest.fixture(scope="module")
def deployed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    directory = tmp_path_factory.mktemp("deployed")
    http_port, grpc_port = free_port(LOOPBACK), free_port(LOOPBACK)
    values = ci_values("cpu-smoke")
    values["settings"]["target"] |= {"path": str(model), "served_name": "tiny"}
    values["settings"] |= {"server": {"grpc_port": grpc_port}, "draft": {"placement": "drafter"}}
    rendered = render(values)
    config = rendered.serve_config
    config["http_options"]["port"] = http_port  # a pod has port 8000 to itself, this machine may not
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    places, variables = nodes(rendered), {}
    with ExitStack() as running:
        if PROGRAM is not None:
            redis = running.enter_context(redis_server(directory))
            variables = {"RAY_REDIS_ADDRESS": redis.address, "RAY_external_storage_namespace": "pilotfish"}
            places["head"] |= {"redis_username": redis.username, "redis_password": redis.password}
        cluster = running.enter_context(SeveralNodes(places, variables))
        assert cluster.deploy_file(file) == {"pilotfish": "RUNNING"}
        yield Deployed(cluster, file, Server(f"{LOOPBACK}:{grpc_port}", f"http://{LOOPBACK}:{http_port}", "tiny"))


def test_each_role_runs_in_its_group_and_both_apis_answer(deployed: Deployed) -> None:
    places = {role: deployed.cluster.counts(f"{REPLICA}{role}") for role in ("Target", "Draft", "Ingress")}
    assert places == {"Target": {"target": 1}, "Draft": {"ingress": 1}, "Ingress": {"ingress": 1}}
    server = deployed.server
    outcome = check(server.http_url, server.grpc_address)
    assert outcome.returncode == 0, outcome.stderr
    wrong = check(f"{server.http_url}/nowhere", server.grpc_address)
    assert wrong.returncode != 0 and "404" in wrong.stderr


def check(url: str, address: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the chart's test pod."""
    script = CHART / "files" / "check_apis.py"
    environment = os.environ | {"HTTP_URL": url, "GRPC_ADDRESS": address}
    return subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
    )


@pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed (apt-get install redis-server)")
async def test_streams_go_on_while_the_heads_control_store_restarts(deployed: Deployed, model: Path) -> None:
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sampling = SamplingParameters(temperature=CASE.temperature, seed=CASE.seed)
    expected = write_alone(alone, CASE.prompt, sampling, CASE.max_tokens)

    replicas = deployed.cluster.processes(REPLICA)
    restarted = asyncio.Event()
    asking = [asyncio.create_task(_ask(ask, deployed.server, restarted)) for ask in (tokens_grpc, tokens_http)]
    await asyncio.sleep(1.0)
    killed = time.monotonic()
    await asyncio.to_thread(deployed.cluster.restart_control_store, OUTAGE_SECONDS)
    await asyncio.sleep(AFTERWARDS_SECONDS)
    restarted.set()
    answers = [await task for task in asking]
    assert deployed.cluster.processes(REPLICA) == replicas
    assert deployed.cluster.deploy_file(deployed.file) == {"pilotfish": "RUNNING"}

    for given in answers:
        assert {tokens for _, _, tokens in given} == {expected}
        assert any(began < killed < ended for began, ended, _ in given), "no stream saw the store die"
        times = [(round(began - killed, 1), round(ended - killed, 1)) for began, ended, _ in given]
        assert any(began > 0 and ended < OUTAGE_SECONDS for began, ended in times), (
            f"nothing without the store: {times}"
        )
        assert any(began > OUTAGE_SECONDS for began, _ in times), f"nothing afterwards: {times}"


async def _ask(
    ask: Callable[[Server, RequestCase], Awaitable[tuple[int, ...]]], server: Server, until: asyncio.Event
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Ask again and again. Returns when each answer began and ended, and its tokens."""
    given = []
    while not until.is_set():
        began = time.monotonic()
        tokens = await ask(server, CASE)
        given.append((began, time.monotonic(), tokens))
    return given
