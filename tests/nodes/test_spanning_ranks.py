"""With `target.span_nodes`, the ranks of a target are on two nodes. A frozen one is replaced, and no token changes.

The nodes are Ray's, on this machine, and their GPUs are logical ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.wire.address import join_host_port
from deploy.local.local_cluster import LocalCluster
from tests.support.clusters.live_cluster import RequestCase, Server, tokens_grpc
from tests.support.clusters.several_nodes import SeveralNodes
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 180.0
STEP_SECONDS = 5.0
NODES = {
    "head": {"num_cpus": 1, "num_gpus": 0},
    "first": {"num_cpus": 1, "num_gpus": 1},
    "second": {"num_cpus": 1, "num_gpus": 1},
}
CASE = RequestCase(tuple(range(40, 60)), max_tokens=400, temperature=1.0, seed=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.llama(vocab_size=320, max_position_embeddings=1024, num_attention_heads=4, num_key_value_heads=2)
    return tiny_tokenizer.byte_level(tiny.save(tmp_path_factory.mktemp("models") / "tiny", shape))


def configure(model: Path, **changes: object) -> Configuration:
    overrides = {"target.path": str(model), "target.device": "cpu", "target.kv.pool_bytes": 8 << 20}
    overrides |= {"server.grpc_port": free_port(LOOPBACK), "server.http_port": free_port(LOOPBACK)}
    return load_configuration({}, overrides | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[int, ...]:
    """The answer of one rank without drafts."""

    async def answer() -> tuple[int, ...]:
        async with LocalCluster(configure(model, draft__method="none")) as local:
            return await tokens_grpc(Server(local.grpc_address, ""), CASE)

    return asyncio.run(answer())


@pytest.fixture(scope="module")
def nodes() -> Iterator[SeveralNodes]:
    with SeveralNodes(NODES) as running:
        yield running


async def test_ranks_on_two_nodes_answer_and_a_frozen_one_is_replaced(
    nodes: SeveralNodes, model: Path, expected: tuple[int, ...]
) -> None:
    ranks = {"target__tensor_parallel": 2, "target__step_timeout_seconds": STEP_SECONDS, "target__span_nodes": True}
    configuration = configure(model, **ranks)
    await asyncio.to_thread(nodes.deploy, configuration)
    server = Server(join_host_port(configuration.server.grpc_host, configuration.server.grpc_port), "")
    places = nodes.counts("ray::FirstRank"), nodes.counts("ray::WorkerRank")
    assert [sum(place.values()) for place in places] == [1, 1]
    assert set(places[0]) | set(places[1]) == {"first", "second"}
    async with asyncio.timeout(TIMEOUT_SECONDS):
        assert await tokens_grpc(server, CASE) == expected
        (frozen,) = nodes.processes("ray::WorkerRank")[next(iter(places[1]))]
        asking = asyncio.create_task(tokens_grpc(server, CASE))
        await asyncio.sleep(0.2)
        assert not asking.done(), "the answer was complete before the rank was frozen"
        frozen.suspend()
        assert await asking == expected
    assert not frozen.is_running()
