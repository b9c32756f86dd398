"""Ray's control store (GCS) restarts on the head while clients stream. Its state is in Redis; no token passes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from cluster.core.request import SamplingParameters
from tests.nodes.test_chart_deployment import nodes
from tests.support.chart.rendering import ci_values, render
from tests.support.clusters.live_cluster import RequestCase, Server, tokens_grpc, tokens_http
from tests.support.clusters.redis_server import LOOPBACK, PROGRAM, redis_server
from tests.support.clusters.several_nodes import SeveralNodes
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.plain_generation import write_alone
from workers.serve.node import free_port

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed (apt-get install redis-server)"),
]

CASE = RequestCase(tuple(range(40, 60)), max_tokens=150, temperature=0.9, seed=7)
OUTAGE_SECONDS = 10.0
AFTERWARDS_SECONDS = 5.0


async def test_streams_go_on_while_the_heads_control_store_restarts(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    tiny.save(model, tiny.llama(vocab_size=320, max_position_embeddings=1024))
    tiny_tokenizer.byte_level(model)
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sampling = SamplingParameters(temperature=CASE.temperature, seed=CASE.seed)
    expected = write_alone(alone, CASE.prompt, sampling, CASE.max_tokens)
    values = ci_values("cpu-smoke")
    values["settings"]["target"] |= {"path": str(model), "served_name": "tiny"}
    values["settings"] |= {"server": {"grpc_port": free_port(LOOPBACK)}, "draft": {"method": "suffix"}}
    rendered = render(values)
    config = rendered.serve_config
    config["http_options"]["port"] = free_port(LOOPBACK)  # a pod has port 8000 to itself, this machine may not
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    server = Server(
        f"{LOOPBACK}:{values['settings']['server']['grpc_port']}",
        f"http://{LOOPBACK}:{config['http_options']['port']}",
        "tiny",
    )

    with redis_server(tmp_path) as redis:
        variables = {"RAY_REDIS_ADDRESS": redis.address, "RAY_external_storage_namespace": "pilotfish"}
        places = nodes(rendered)
        places["head"] |= {"redis_username": redis.username, "redis_password": redis.password}
        with SeveralNodes(places, variables) as cluster:
            assert cluster.deploy_file(file) == {"pilotfish": "RUNNING"}
            replicas = cluster.processes("ray::ServeReplica:pilotfish:")
            restarted = asyncio.Event()
            asking = [asyncio.create_task(_ask(ask, server, restarted)) for ask in (tokens_grpc, tokens_http)]
            await asyncio.sleep(1.0)
            killed = time.monotonic()
            await asyncio.to_thread(cluster.restart_control_store, OUTAGE_SECONDS)
            await asyncio.sleep(AFTERWARDS_SECONDS)
            restarted.set()
            answers = [await task for task in asking]
            assert cluster.processes("ray::ServeReplica:pilotfish:") == replicas
            assert cluster.deploy_file(file) == {"pilotfish": "RUNNING"}

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
