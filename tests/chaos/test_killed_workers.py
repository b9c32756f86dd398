"""Processes are killed in the middle of an answer. The client receives the same text, possibly after a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.test_equality import Expected, configure
from tests.support.clusters.live_cluster import Reference, RequestCase, Server, tokens_grpc, tokens_http
from tests.support.clusters.serve_process import Deploy, ServeProcess

pytestmark = [pytest.mark.weights, pytest.mark.ray]

TOKENS = 64
REVIVAL_SECONDS = 60
DEATHS = 2
PROMPT = "Repeat this list twice: one two three four five six seven eight nine ten."


@pytest.fixture
def cluster(deploy: Deploy, target_directory: Path) -> ServeProcess:
    return deploy(configure(target_directory, None, "ngram", ranks=1, placement="drafter"))


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Expected:
    greedy = RequestCase(reference.chat(PROMPT), TOKENS)
    sampled = RequestCase(reference.chat(PROMPT), TOKENS, 0.8, 0.95, 11)
    return {greedy: reference.greedy(greedy.prompt, TOKENS), sampled: reference.sampled(sampled)}


DRAFTER = "ray::ServeReplica:pilotfish:Draft"
COORDINATOR = "ray::ServeReplica:pilotfish:Target"
FIRST_RANK = "ray::FirstRank"
"""Titles of processes, which Ray sets to the names of replicas and actors."""


def metric(server: Server, name: str) -> float:
    """The value of a counter, summed over its labels."""
    text = httpx.get(f"{server.http_url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


async def eventually(condition: Callable[[], bool], seconds: float = REVIVAL_SECONDS) -> bool:
    """Whether the condition becomes true in time."""
    for _ in range(int(seconds * 4)):
        if condition():
            return True
        await asyncio.sleep(0.25)
    return False


async def kill_during_answers(title: str, cluster: ServeProcess, expected: Expected) -> None:
    """Send every request over both APIs at once, kill the processes with the title, and compare all answers."""
    server, victims = cluster.server, cluster.descendants(title)
    assert victims
    before = metric(server, "vllm:generation_tokens_total")
    cases = [*expected, *expected]
    apis = [*[tokens_grpc] * len(expected), *[tokens_http] * len(expected)]
    answers = asyncio.gather(*(api(server, case) for api, case in zip(apis, cases, strict=True)))
    assert await eventually(lambda: metric(server, "vllm:generation_tokens_total") > before + 8)
    for victim in victims:
        victim.kill()
        victim.wait()
    generated = metric(server, "vllm:generation_tokens_total") - before
    assert generated < len(cases) * TOKENS, "the answers were complete before the kill"
    for case, answer in zip(cases, await answers, strict=True):
        assert answer == expected[case]


async def drafts_are_used(server: Server, expected: Expected) -> bool:
    """Whether an answer with verified drafts arrives within a few seconds."""
    for _ in range(20):
        before = metric(server, "vllm:spec_decode_num_drafts_total")
        await tokens_grpc(server, next(iter(expected)))
        if metric(server, "vllm:spec_decode_num_drafts_total") > before:
            return True
        await asyncio.sleep(1)
    return False


async def test_a_drafter_killed_several_times_changes_no_text_and_is_used_again(
    cluster: ServeProcess, expected: Expected
) -> None:
    for _ in range(DEATHS):
        await kill_during_answers(DRAFTER, cluster, expected)
        assert await eventually(lambda: bool(cluster.descendants(DRAFTER))), "the drafter was not started again"
        assert await drafts_are_used(cluster.server, expected), "the new drafter is not used"


@pytest.mark.essential
async def test_killing_the_target_changes_no_text_and_its_coordinator_starts_it_again(
    cluster: ServeProcess, expected: Expected
) -> None:
    coordinators = cluster.descendants(COORDINATOR)
    await kill_during_answers(FIRST_RANK, cluster, expected)
    assert cluster.descendants(COORDINATOR) == coordinators
    assert metric(cluster.server, "pilotfish:target_replays_total") > 0
    assert metric(cluster.server, "vllm:spec_decode_num_accepted_tokens_total") > 0
