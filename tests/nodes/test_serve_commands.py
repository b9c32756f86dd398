"""`serve build`, `serve deploy` and `serve run` start applications that share one Ray cluster and its HTTP port.

An application that is deployed again replaces its replicas while its clients stream.

The models are tiny and random, and different for each application, so an answer shows which application gave it. The
second model has a hub id that only processes of the Ray cluster can resolve.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from cluster.core.request import SamplingParameters
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from tests.chaos.doors import GrpcDoor, HttpDoor
from tests.chaos.harness import ChaosOptions, workload_of
from tests.chaos.streams import Streams
from tests.soak.requests import MAX_TOKENS
from tests.support.clusters.live_cluster import RequestCase, Server, answer_grpc, answer_http
from tests.support.clusters.ray_head import LOOPBACK, RayHead, ray_head
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.plain_generation import write_alone
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

READY_SECONDS = 240.0
"""Longest time from the command to the first answer, on a busy machine."""
COMMIT = "0" * 40
CASES = [
    RequestCase(tuple(range(40, 60)), max_tokens=20),
    RequestCase(tuple(range(60, 90)), max_tokens=20, temperature=0.9, seed=7),
]


def save(directory: Path, layers: int) -> Path:
    tiny.save(
        directory,
        tiny.llama(vocab_size=320, num_hidden_layers=layers, max_position_embeddings=MAX_TOKENS),
        sharpness=1.0 + layers,
    )
    return tiny_tokenizer.byte_level(directory)


def settings(model: Path, grpc_port: int) -> dict[str, Any]:
    kv = {"pool_bytes": 8 << 20}
    return {
        "target": {"path": str(model), "device": "cpu", "compile": "off", "threads": 1, "kv": kv},
        "draft": {"method": "suffix", "placement": "target", "controller": "off"},
        "server": {"grpc_port": grpc_port, "drain_timeout_seconds": 0.1},
    }


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "first", layers=2)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a model hub."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def second(hub: Path) -> Path:
    """The snapshot of the model `tests/second`."""
    stored = hub / "hub" / "models--tests--second"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    return save(stored / "snapshots" / COMMIT, layers=1)


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return [free_port(LOOPBACK) for _ in range(3)]


@pytest.fixture(scope="module")
def head(first: Path, hub: Path, ports: list[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    directory = tmp_path_factory.mktemp("ray")
    configuration = directory / "first.yaml"
    configuration.write_text(yaml.safe_dump(settings(first, ports[1])))
    variables = {"PILOTFISH_CONFIG": str(configuration), "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    with ray_head(4, directory / "ray.log", **variables) as running:
        yield running


def wait_until_ready(head: RayHead, url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    status = ""
    while time.monotonic() < deadline and "DEPLOY_FAILED" not in status:
        for _ in range(20):
            try:
                if httpx.get(f"{url}/ready", timeout=5.0).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        status = head.run("serve", "status").stdout
    pytest.fail(f"not ready: {status}")


async def check(server: Server, model: Path) -> None:
    """Both APIs give the answers of the model alone."""
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for case in CASES:
        sampling = SamplingParameters(temperature=case.temperature, seed=case.seed)
        expected = write_alone(alone, case.prompt, sampling, case.max_tokens)
        for answer in (await answer_grpc(server, case), await answer_http(server, case)):
            assert answer.tokens == expected


@pytest.fixture(scope="module")
def deployed(head: RayHead, ports: list[int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a built file, which is deployed."""
    file = tmp_path_factory.mktemp("built") / "serve.yaml"
    built = head.run("serve", "build", "deploy.ray.application:app", "-o", str(file))
    assert built.returncode == 0, built.stderr

    written = yaml.safe_load(file.read_text())
    (application,) = written["applications"]
    assert application["import_path"] == "deploy.ray.application:app"
    assert {entry["name"] for entry in application["deployments"]} == {"Target", "Ingress"}
    written["http_options"] = {"host": LOOPBACK, "port": ports[0]}
    application["name"] = "first"
    deploy(head, written, file)
    wait_until_ready(head, f"http://{LOOPBACK}:{ports[0]}")
    return written


def deploy(head: RayHead, content: dict[str, Any], file: Path) -> None:
    file.write_text(yaml.safe_dump(content))
    done = head.run("serve", "deploy", str(file))
    assert done.returncode == 0, done.stderr


async def coordinators(url: str) -> set[str]:
    """The ids of the coordinators that answer, as the metrics name them."""
    async with httpx.AsyncClient() as client:
        try:
            text = (await client.get(f"{url}/metrics", timeout=10.0)).text
        except httpx.TransportError:
            return set()
    return set(re.findall(r'^vllm:num_requests_running\{.*replica="([^"]+)"', text, re.MULTILINE))


async def test_streams_outlive_an_application_that_is_deployed_again(
    head: RayHead, first: Path, deployed: dict[str, Any], ports: list[int], tmp_path: Path
) -> None:
    url, work = f"http://{LOOPBACK}:{ports[0]}", workload_of(first, ChaosOptions(distinct=12, seed=5))
    client, http = GenerationClient(fixed_address(f"{LOOPBACK}:{ports[1]}")), httpx.AsyncClient()
    doors = [[GrpcDoor(client)], [HttpDoor(http, lambda: url, "first")]]
    # New processes start in the time that the clients' pauses leave.
    streams = Streams(doors, work.requests, work.reference, at_once=6, seed=5, pause_seconds=1.0)
    before = await coordinators(url)
    assert len(before) == 1
    application = deployed["applications"][0] | {"import_path": "deploy.ray.application:build_app"}
    application["args"] = settings(first, ports[1]) | {"draft": {"method": "none"}}
    running = asyncio.create_task(streams.run())
    await asyncio.to_thread(deploy, head, deployed | {"applications": [application]}, tmp_path / "serve.yaml")
    async with asyncio.timeout(READY_SECONDS):
        while not (after := await coordinators(url)) or after & before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.5)
    results = streams.results
    before_the_switch = results.complete
    await asyncio.sleep(1.0)
    streams.end()
    await running
    await client.close()
    await http.aclose()
    assert not results.errors, results.shown
    assert not results.differences, results.shown
    assert before_the_switch > 20
    assert results.complete > before_the_switch, "nothing was answered by the new replica"


async def test_a_second_application_runs_beside_the_deployed_one(
    head: RayHead, first: Path, second: Path, deployed: dict[str, Any], ports: list[int], tmp_path: Path
) -> None:
    http, grpc, other_grpc = ports
    url = f"http://{LOOPBACK}:{http}"
    await check(Server(f"{LOOPBACK}:{grpc}", url, "first"), first)

    arguments = ["target.path=tests/second", f"server.grpc_port={other_grpc}"]
    options = ["--name", "second", "--route-prefix", "/second", "--non-blocking"]
    elsewhere = {"HF_HOME": str(tmp_path)}
    run = head.run("serve", "run", *options, "deploy.ray.application:build_app", *arguments, **elsewhere)
    assert run.returncode == 0, run.stderr
    wait_until_ready(head, f"{url}/second")
    await check(Server(f"{LOOPBACK}:{other_grpc}", f"{url}/second", "second"), second)
    await check(Server(f"{LOOPBACK}:{grpc}", url, "first"), first)
    status = yaml.safe_load(head.run("serve", "status").stdout)
    assert {name: entry["status"] for name, entry in status["applications"].items()} == {
        "first": "RUNNING",
        "second": "RUNNING",
    }

    joined = {"PILOTFISH_RAY_ADDRESS": head.address}
    taken = head.run("pilotfish", "serve", "--set", "server.application=second", **joined)
    assert taken.returncode == 2
    lines = taken.stderr.splitlines()
    assert any(line.startswith("pilotfish: server.application: needed a name that no") for line in lines)
    assert any(line.startswith("pilotfish: server.route_prefix: needed a prefix that no") for line in lines)
    planned = json.loads(head.run("pilotfish", "plan", "--json", **joined).stdout)
    (node,) = planned["nodes"]
    assert node["cpus"] == 4 and node["memory_bytes"] > 0
    assert {process["node"] for process in planned["processes"]} == {node["node"]}
    assert not planned["problems"]
