"""Every API reports whether answers are lossless: HTTP answers, model cards, gRPC responses and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import tiny, tiny_tokenizer
from workers.sampling.acceptance import RULES

SECONDS = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tiny.save(tmp_path_factory.mktemp("lossless"), tiny.llama(vocab_size=320))
    return tiny_tokenizer.byte_level(target)


async def statements(directory: Path, target: dict[str, Any]) -> dict[str, bool]:
    """Whether the cluster reports that it is lossless, by the place of the report."""
    configuration = tiny_cluster(directory, {}, kv=target.pop("kv", {}), target=target)
    async with asyncio.timeout(SECONDS), LocalCluster(configuration, http=True) as cluster:
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=SECONDS) as http:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            answer = (await http.post("/v1/completions", json=body)).json()
            models = (await http.get("/v1/models")).json()
            metrics = (await http.get("/metrics")).text
        client = GenerationClient(fixed_address(cluster.grpc_address))
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=(5, 6, 7)),
            stopping=generation_pb2.StoppingCriteria(max_tokens=4),
        )
        lossy = {response.lossy async for response in client.generate(request, SECONDS)}
        card = await client.get_model("tiny")
        await client.close()
    assert len(lossy) == 1
    return {
        "HTTP answer": answer["lossless"],
        "HTTP model card": models["data"][0]["lossless"],
        "gRPC responses": not lossy.pop(),
        "gRPC model card": not card.lossy,
        "metric": 'pilotfish:lossless{engine="0",model_name="tiny"} 1.0' in metrics,
    }


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "window": ({"kv": {"window": 16}}, False),
    "int8 keys and values": ({"kv": {"dtype": "int8"}}, False),
    "int8": ({"quantization": "int8"}, True),
    "blockwise by rank": ({"acceptance": "blockwise", "blockwise": {"top_k": 2}}, False),
    "blockwise by distance": ({"acceptance": "blockwise", "blockwise": {"distance": 1}}, False),
    "blockwise by length": ({"acceptance": "blockwise", "blockwise": {"minimum_block": 2}}, False),
    **{
        name: ({"acceptance": name}, rule.create(rule.settings()).is_lossless)
        for name, rule in RULES.items()
        if name != "synthetic"
    },
}
"""Settings of a target, and whether its answers are lossless. No rule is left out but that of experiments."""


@pytest.mark.parametrize("case", CASES)
async def test_every_api_says_whether_answers_are_lossless(directory: Path, case: str) -> None:
    target, is_lossless = CASES[case]
    found = await statements(directory, dict(target))
    assert found == dict.fromkeys(found, is_lossless)
