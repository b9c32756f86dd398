"""Clients receive exactly the tokens that the model alone generates.

Greedy text equals `generate` of `transformers` in float32, and sampled text with a seed equals a plain loop over the
model's own forward pass. This holds for every drafting method, batch size and API. Every prompt is sent among seven
others over gRPC and over HTTP, and alone over one of the two in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from deploy.local.local_cluster import LocalCluster
from deploy.settings import code_directory, load_settings
from tests.support.clusters.live_cluster import ClientAnswer, RequestCase, Server, answer_all, answer_grpc, answer_http
from tests.support.clusters.tiny_cluster import tiny_cluster

pytestmark = pytest.mark.weights

METHODS = ("none", "ngram", "model")
ALONE_TOKENS = 5
Expected = dict[RequestCase, tuple[int, ...]]


def configure(target: Path, draft: Path | None, method: str, ranks: int, placement: str = "auto") -> Configuration:
    """A cluster that verifies drafts in every round, even where they do not increase the speed.

    Methods joined by `+` share a tree.
    """
    drafting: dict[str, Any] = {"methods": method.split("+"), "max_nodes": 6, "max_depth": 3, "timeout_seconds": 60.0}
    drafting |= {"controller": "off", "placement": placement}
    if "model" in method:
        drafting["model"] = {"path": str(draft), "device": "cpu", "kv": {"pool_bytes": 300 << 20}}
    code = str(code_directory(load_settings().cache_directory))
    settings: dict[str, Any] = {"served_name": "smollm2-135m-instruct", "compile": "auto", "tensor_parallel": ranks}
    settings["compile_directory"] = code
    scheduler = {"max_sequences": 12, "max_step_tokens": 128}
    return tiny_cluster(target, drafting, target=settings, kv={"pool_bytes": 300 << 20}, scheduler=scheduler)


def shortened(expected: Expected, count: int) -> Expected:
    """Cut the requests and their answers to `count` tokens. An answer's beginning does not depend on its length."""
    return {replace(case, max_tokens=count): answer[:count] for case, answer in expected.items()}


async def check(server: Server, expected: Expected, concurrency: int) -> list[ClientAnswer]:
    """Compare every answer with the expected one, over both APIs. Returns the answers."""
    cases = list(expected)
    found = await answer_all(server, cases, concurrency)
    for case, (over_grpc, over_http) in zip(cases, found, strict=True):
        assert over_grpc.tokens == expected[case], case
        assert over_http.tokens == expected[case], case
    return [answer for pair in found for answer in pair]


async def check_alone(server: Server, expected: Expected) -> list[ClientAnswer]:
    """Compare every answer with the expected one, one after another and over the two APIs in turn."""
    found = [await (answer_grpc, answer_http)[turn % 2](server, case) for turn, case in enumerate(expected)]
    for (case, wanted), answer in zip(expected.items(), found, strict=True):
        assert answer.tokens == wanted, case
    return found


def check_drafts(method: str, answers: Sequence[ClientAnswer]) -> None:
    """Check that drafts were verified if there is a drafter, that some were accepted and some rejected.

    A draft model drafts for nearly all answers and agrees with its target in most of them. An answer has no drafts if
    it ends while the drafter still prefills a long prompt. Prompt lookup finds drafts for some answers.
    """
    drafted, accepted = sum(answer.drafted for answer in answers), sum(answer.accepted for answer in answers)
    if method == "none":
        assert drafted == 0
        return
    assert 0 < accepted < drafted
    if "model" in method:
        assert sum(answer.drafted > 0 for answer in answers) >= 0.9 * len(answers)
        assert sum(answer.accepted > 0 for answer in answers) > len(answers) / 2


@pytest.mark.parametrize("method", METHODS)
async def test_one_rank(
    method: str, target_directory: Path, draft_directory: Path, greedy: Expected, sampled: Expected
) -> None:
    assert len(greedy) >= 20
    configuration = configure(target_directory, draft_directory, method, ranks=1)
    async with LocalCluster(configuration, http=True) as cluster:
        server = Server(cluster.grpc_address, cluster.http_url)
        for expected in (greedy, sampled):
            check_drafts(method, await check_alone(server, shortened(expected, ALONE_TOKENS)))
            check_drafts(method, await check(server, expected, concurrency=8))
