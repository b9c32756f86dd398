"""Two targets of two ranks, two drafters and two ingresses on four nodes: who runs where, and what a lost node does.

The GPUs are logical: the processes claim them and compute on the CPU. The model is tiny and random. Answers are
compared with those of one rank without drafts in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.core.config.sections import Configuration
from cluster.wire.address import http_url, join_host_port
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from tests.chaos.doors import GrpcDoor, HttpDoor
from tests.chaos.harness import ChaosOptions, workload_of
from tests.chaos.streams import Streams
from tests.support.clusters.live_cluster import RequestCase, Server, answer_all, tokens_grpc, tokens_http
from tests.support.clusters.several_nodes import SeveralNodes
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 150.0
"""Seconds. Longer than any answer takes, so that a hang becomes a failure."""
SHORT = [RequestCase(tuple(range(40 + first, 60 + 2 * first)), 24, first % 2, seed=first) for first in range(8)]
LONG = [RequestCase(tuple(range(first, first + 40)), 900, first % 2, seed=first) for first in range(100, 108)]
Expected = dict[RequestCase, tuple[int, ...]]

NODES = {
    "head": {"num_cpus": 2, "num_gpus": 0, "resources": {"ingresses": 1}},
    "first": {"num_cpus": 1, "num_gpus": 2, "resources": {"targets": 1}},
    "second": {"num_cpus": 1, "num_gpus": 2, "resources": {"targets": 1}},
    "drafts": {"num_cpus": 2, "num_gpus": 2, "resources": {"drafters": 1}},
}
REPLICA = "ray::ServeReplica:pilotfish:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    shape = tiny.llama(vocab_size=320, max_position_embeddings=1024, num_attention_heads=4, num_key_value_heads=2)
    tiny.save(directory, shape)
    return tiny_tokenizer.byte_level(directory)


@pytest.fixture(scope="module")
def draft_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.blur(model, tmp_path_factory.mktemp("draft"), noise=0.05)


def configure(model: Path, **changes: object) -> Configuration:
    overrides = {"target.path": str(model), "target.device": "cpu", "target.kv.pool_bytes": 16 << 20}
    return load_configuration({}, overrides | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    """The answers of one rank without drafts."""

    async def answers(configuration: Configuration) -> Expected:
        async with LocalCluster(configuration) as local:
            server, cases = Server(local.grpc_address, ""), (*SHORT, *LONG)
            found = await asyncio.gather(*(tokens_grpc(server, case) for case in cases))
            return dict(zip(cases, found, strict=True))

    return asyncio.run(answers(configure(model, draft__method="none", server__grpc_port=0, server__http_port=0)))


@pytest.fixture(scope="module")
def configuration(model: Path, draft_model: Path) -> Configuration:
    return configure(
        model,
        target__replicas=2,
        target__tensor_parallel=2,
        target__node_resource="targets",
        draft__replicas=2,
        draft__node_resource="drafters",
        draft__method="model",
        draft__controller="off",
        draft__timeout_seconds=5.0,
        draft__model__path=str(draft_model),
        draft__model__device="cpu",
        draft__model__kv__pool_bytes=8 << 20,
        server__ingress_replicas=2,
        server__ingress_node_resource="ingresses",  # else one may take the core of an ended target
        server__drain_timeout_seconds=0.5,
        server__grpc_port=free_port(LOOPBACK),
        server__http_port=free_port(LOOPBACK),
    )


@pytest.fixture(scope="module")
def nodes(configuration: Configuration) -> Iterator[SeveralNodes]:
    with SeveralNodes(NODES) as running:
        running.deploy(configuration)
        yield running


@pytest.fixture(scope="module")
def server(configuration: Configuration) -> Server:
    section = configuration.server
    return Server(
        join_host_port(section.grpc_host, section.grpc_port), http_url(section.http_host, section.http_port), "tiny"
    )


def generated_by(server: Server) -> dict[str, float]:
    """Number of tokens that each coordinator has generated, by its id."""
    text = httpx.get(f"{server.http_url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def wait_until_generating(server: Server, before: dict[str, float]) -> None:
    """Return when each coordinator has generated some more tokens than `before`."""
    while not all(count > before[name] + 40 for name, count in generated_by(server).items()):
        time.sleep(0.1)


async def tokens_and_resumed(server: Server, case: RequestCase) -> tuple[tuple[int, ...], int]:
    """The answer over gRPC, and how many of its tokens another coordinator had generated."""
    tokens: list[int] = []
    resumed = 0
    async with GenerationClient(fixed_address(server.grpc_address)) as client:
        async for response in client.generate(case.message(), ANSWER_SECONDS):
            tokens.extend(response.delta.token_ids)
            resumed += response.finished.usage.resumed_tokens
    return tuple(tokens), resumed


def test_each_target_is_on_one_node_and_no_drafter_on_the_gpu_of_a_target(nodes: SeveralNodes) -> None:
    for title in (f"{REPLICA}Target", "ray::FirstRank", "ray::WorkerRank"):
        assert nodes.counts(title) == {"first": 1, "second": 1}
    assert nodes.counts(f"{REPLICA}Draft") == {"drafts": 2}
    assert nodes.counts(f"{REPLICA}Ingress") == {"head": 2}
    assert nodes.free_gpus() == 0.0  # six processes claim one each


async def test_requests_are_spread_over_both_targets_and_answers_are_those_of_one_rank(
    nodes: SeveralNodes, server: Server, expected: Expected
) -> None:
    answers = await answer_all(server, SHORT, concurrency=8)

    for case, pair in zip(SHORT, answers, strict=True):
        assert [answer.tokens for answer in pair] == [expected[case]] * 2
    assert sum(answer.accepted for pair in answers for answer in pair) > 0
    generated = generated_by(server)
    assert len(generated) == 2
    assert all(generated.values())


def pids(nodes: SeveralNodes, title: str) -> set[int]:
    return {process.pid for found in nodes.processes(title).values() for process in found}


async def test_streams_outlive_a_rolling_update_that_replaces_every_process(
    nodes: SeveralNodes, server: Server, configuration: Configuration, model: Path
) -> None:
    work = workload_of(model, ChaosOptions(distinct=12, seed=7))
    client, http = GenerationClient(fixed_address(server.grpc_address)), httpx.AsyncClient()
    doors = [[GrpcDoor(client)], [HttpDoor(http, lambda: server.http_url, "tiny")]]
    # New processes start in the time that the clients' pauses leave.
    streams = Streams(doors, work.requests, work.reference, at_once=8, seed=7, pause_seconds=2.0)
    before = pids(nodes, REPLICA) | pids(nodes, "ray::FirstRank") | pids(nodes, "ray::WorkerRank")
    running = asyncio.create_task(streams.run())
    draft = configuration.draft.model_copy(update={"max_nodes": 4})
    await asyncio.to_thread(nodes.deploy, configuration.model_copy(update={"draft": draft}))
    await asyncio.sleep(1.0)
    streams.end()
    await running
    await client.close()
    await http.aclose()
    results = streams.results
    assert not results.errors, results.shown
    assert not results.differences, results.shown
    assert results.complete > 20
    assert not before & pids(nodes, REPLICA)
    assert not before & (pids(nodes, "ray::FirstRank") | pids(nodes, "ray::WorkerRank"))


async def test_streams_of_a_lost_node_go_on_at_the_other_target(
    nodes: SeveralNodes, server: Server, expected: Expected
) -> None:
    before = generated_by(server)
    over_grpc = asyncio.gather(*(tokens_and_resumed(server, case) for case in LONG))
    async with asyncio.timeout(ANSWER_SECONDS):
        await asyncio.to_thread(wait_until_generating, server, before)  # alone, they are spread over both targets
        over_http = asyncio.gather(*(tokens_http(server, case) for case in LONG))
        await asyncio.to_thread(nodes.remove, "first")
        assert not over_grpc.done(), "the answers were complete before the kill"
        answers = await over_grpc
        assert await over_http == [expected[case] for case in LONG]

    assert [tokens for tokens, _ in answers] == [expected[case] for case in LONG]
    assert any(resumed for _, resumed in answers), "no stream moved"
    assert list(nodes.counts(f"{REPLICA}Target")) == ["second"]
