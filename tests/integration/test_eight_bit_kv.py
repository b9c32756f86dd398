"""SmolLM2 with keys and values in 8 bits: drafts and neighbors change no token, and few differ from the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from deploy.local.local_cluster import LocalCluster
from deploy.settings import code_directory, load_settings
from tests.support.clusters.live_cluster import ClientAnswer, RequestCase, Server, answer_grpc
from tests.support.clusters.tiny_cluster import tiny_cluster

pytestmark = pytest.mark.weights

TOKENS = 24
LEAST_AGREED = {
    ("int8", "float32"): 0.97,
    ("int8", "bfloat16"): 0.95,
    ("fp8", "float32"): 0.9,
    ("fp8", "bfloat16"): 0.9,
}
"""Least share of greedy tokens that are those with full keys and values, each after the same tokens before it.

Measured on a CPU with bfloat16 products: 190 and 188 of 192 with int8, 184 and 184 with fp8.
With 5 bits in float32: 170 of 192.
"""
CASES = list(LEAST_AGREED)


def configure(target: Path, kv: str, dtype: str, method: str) -> Configuration:
    code = str(code_directory(load_settings().cache_directory))
    settings = {"compile": "auto", "dtype": dtype, "compile_directory": code}
    draft = {"method": method, "controller": "off", "timeout_seconds": 60.0}
    memory = {"dtype": kv, "pool_bytes": 50 << 20}
    scheduler = {"max_sequences": 8, "max_step_tokens": 128}
    return tiny_cluster(target, draft, target=settings, kv=memory, scheduler=scheduler)


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[RequestCase]:
    return [RequestCase(prompt, TOKENS) for prompt in prompts[::3]]


async def answers_of(
    configuration: Configuration, requests: Sequence[RequestCase], *, together: bool
) -> list[ClientAnswer]:
    async with LocalCluster(configuration) as cluster:
        server = Server(cluster.grpc_address, "")
        if together:
            return list(await asyncio.gather(*(answer_grpc(server, request) for request in requests)))
        return [await answer_grpc(server, request) for request in requests]


@pytest.mark.parametrize(("kv", "dtype"), CASES, ids=lambda value: str(value))
async def test_drafts_and_neighbors_change_no_token(
    kv: str, dtype: str, target_directory: Path, requests: list[RequestCase]
) -> None:
    full = await answers_of(configure(target_directory, "auto", dtype, "none"), requests, together=True)
    texts = [(*request.prompt, *answer.tokens) for request, answer in zip(requests, full, strict=True)]
    prefixes = [RequestCase(text[:length], 1) for text in texts for length in range(len(text) - TOKENS, len(text))]
    plain = configure(target_directory, kv, dtype, "none")
    answers = await answers_of(plain, [*requests, *prefixes], together=False)
    alone, after = answers[: len(requests)], answers[len(requests) :]
    drafted = await answers_of(configure(target_directory, kv, dtype, "ngram"), requests, together=True)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in alone]
    assert sum(answer.accepted for answer in drafted) > 0
    expected = [(token,) for answer in full for token in answer.tokens]
    agreed = sum(answer.tokens == token for answer, token in zip(after, expected, strict=True))
    print(f"{kv} in {dtype}: {agreed} of {len(expected)} tokens as with full keys and values")
    assert agreed >= LEAST_AGREED[kv, dtype] * len(expected)
