"""Requests for ten times the KV memory: all of them finish, every answer is correct, no block leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.base import MIB
from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from tests.soak.watch import read_counts
from tests.support.clusters.live_cluster import RequestCase
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.engines.kv_tiers import always_load
from tests.support.models import tiny, tiny_tokenizer
from workers.kv.pool import KvPool
from workers.verify import build

pytestmark = pytest.mark.slow

SHAPE = {"vocab_size": 320, "num_key_value_heads": 6, "head_dim": 16, "num_hidden_layers": 4}
TOKEN_BYTES = 4 * 2 * 6 * 16 * 4
"""Bytes of the keys and values of one token in four layers."""
POOL_TOKENS = MIB // TOKEN_BYTES
HOST_BYTES, DISK_BYTES = MIB, 2 * MIB
LONGEST_SECONDS = 60.0


def stored_tokens(case: RequestCase) -> int:
    """Tokens that the target stores for a request."""
    return len(case.prompt) + case.max_tokens


def demand() -> list[RequestCase]:
    """Requests that fill ten pools. Many of them share prefixes."""
    draw = random.Random(3)
    stems = [[draw.randrange(3, 300) for _ in range(80)] for _ in range(4)]
    cases: list[RequestCase] = []
    while sum(map(stored_tokens, cases)) < 10 * POOL_TOKENS:
        stem = draw.choice(stems)[: draw.choice((0, 40, 80))]
        prompt = (*stem, *(draw.randrange(3, 300) for _ in range(draw.randrange(10, 60))))
        cases.append(
            RequestCase(prompt, draw.randrange(20, 90), temperature=draw.choice((0.0, 0.9)), seed=draw.randrange(1000))
        )
    return cases


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(**SHAPE)))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[KvPool]:
    """The pools that the test creates. Their cost of computing is set high, so that they load all stored blocks."""
    made: list[KvPool] = []

    class RecordedPool(KvPool):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            made.append(self)
            always_load(self)

    monkeypatch.setattr(build, "KvPool", RecordedPool)
    return made


def configure(directory: Path, **memory: object) -> Configuration:
    draft = {"method": "ngram", "max_nodes": 4, "max_depth": 4, "timeout_seconds": 60.0}
    scheduler = {"max_sequences": 24, "max_step_tokens": 128}
    return tiny_cluster(directory, draft, kv={"block_size": 8, **memory}, scheduler=scheduler)


async def answer(client: GenerationClient, case: RequestCase) -> tuple[int, ...]:
    tokens: list[int] = []
    async for response in client.generate(case.message(), LONGEST_SECONDS):
        tokens.extend(response.delta.token_ids)
    return tuple(tokens)


async def leave_soon(client: GenerationClient, case: RequestCase) -> None:
    """Read one response and cancel the call."""
    responses = client.generate(case.message(), LONGEST_SECONDS)
    await anext(responses)
    await responses.aclose()


async def answers(client: GenerationClient, cases: Sequence[RequestCase]) -> list[tuple[int, ...]]:
    """The answers to all requests, which are sent at the same time."""
    return list(await asyncio.gather(*(answer(client, case) for case in cases)))


async def counts_when_idle(client: GenerationClient) -> dict[str, float]:
    """The server's counters once it holds no blocks."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while (counts := await read_counts(client))["vllm:kv_cache_usage_perc"] > 0:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)
    return counts


def bytes_on_disk(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*/*.safetensors"))


@pytest.mark.parametrize("kv", ["auto", "int8"])
async def test_requests_for_ten_pools_are_answered_with_one(
    kv: str, directory: Path, tmp_path: Path, pools: list[KvPool]
) -> None:
    cases = demand()
    async with LocalCluster(configure(directory, dtype=kv, pool_bytes=16 * MIB, prefix_cache=False)) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        expected = await answers(client, cases)
        assert (await counts_when_idle(client))["vllm:num_preemptions_total"] == 0
        await client.close()

    host_bytes = HOST_BYTES if kv == "auto" else HOST_BYTES // 3  # 8 bits and a scale take a third of float32
    memory = {"pool_bytes": MIB, "host_bytes": host_bytes, "disk_directory": str(tmp_path), "disk_bytes": DISK_BYTES}
    async with LocalCluster(configure(directory, dtype=kv, **memory)) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        leaving = [asyncio.create_task(leave_soon(client, case)) for case in cases[::6]]
        assert await answers(client, cases) == expected
        await asyncio.gather(*leaving)
        for index in range(len(cases) - 8, len(cases)):  # some of their blocks were moved to host or disk
            assert await answer(client, cases[index]) == expected[index]
        counts = await counts_when_idle(client)
        await client.close()
        tiers = pools[-1].tiers
        assert tiers is not None
        tiers.flush()
        assert pools[-1].blocks_free == pools[-1].blocks_total
        assert counts["vllm:num_preemptions_total"] > 0
        assert tiers.host.loaded > 0
        assert tiers.disk.loaded > 0
        assert 0 < bytes_on_disk(tmp_path) <= DISK_BYTES
    assert not bytes_on_disk(tmp_path)
