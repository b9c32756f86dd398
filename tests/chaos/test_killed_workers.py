"""Processes are killed in the middle of an answer; the client sees a pause at most, and the same text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.ray.serve_cluster import ServeCluster, with_ports
from deploy.settings import Settings
from tests.integration.test_equality import configure
from tests.support.live_cluster import Ask, Reference, Server, ask_grpc, ask_http

pytestmark = [pytest.mark.weights, pytest.mark.ray]

TOKENS = 64
REVIVAL_SECONDS = 60
PROMPT = "Repeat this list twice: one two three four five six seven eight nine ten."


@pytest.fixture(scope="module")
def cluster(
    target_directory: Path, draft_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeCluster]:
    configuration = with_ports(configure(target_directory, draft_directory, "ngram", ranks=1))
    with ServeCluster(Settings(configuration, tmp_path_factory.mktemp("cache")), lambda _: None) as running:
        yield running


@pytest.fixture(scope="module")
def server(cluster: ServeCluster) -> Server:
    return Server(cluster.grpc_address, cluster.http_url)


@pytest.fixture(scope="module")
def asks(reference: Reference) -> dict[Ask, tuple[int, ...]]:
    greedy = Ask(reference.chat(PROMPT), TOKENS)
    sampled = Ask(reference.chat(PROMPT), TOKENS, 0.8, 0.95, 11)
    return {greedy: reference.greedy(greedy.prompt, TOKENS), sampled: reference.sampled(sampled)}


def replicas(deployment: str) -> list[int]:
    """Process ids of a deployment's replicas, among our own: Ray writes what a process hosts into its title."""
    title = f"ray::ServeReplica:pilotfish:{deployment}"
    return [process.pid for process in psutil.Process().children(recursive=True) if title in title_of(process)]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


def metric(server: Server, name: str) -> float:
    """A counter's value, summed over its labels."""
    text = httpx.get(f"{server.http_url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


async def eventually(condition: object, seconds: float = REVIVAL_SECONDS) -> bool:
    for _ in range(int(seconds * 2)):
        if condition():  # type: ignore[operator]
            return True
        await asyncio.sleep(0.5)
    return False


async def kill_amid(deployment: str, server: Server, asks: dict[Ask, tuple[int, ...]]) -> None:
    """Ask for everything at once through both doors, kill the deployment's process, compare all answers."""
    victims = replicas(deployment)
    assert victims
    before = metric(server, "vllm:generation_tokens_total")
    questions = [*asks, *asks]
    doors = [ask_grpc, ask_grpc, ask_http, ask_http]
    answers = asyncio.gather(*(door(server, asked) for door, asked in zip(doors, questions, strict=True)))
    under_way = await eventually(lambda: metric(server, "vllm:generation_tokens_total") > before + 8)
    assert under_way
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    complete = metric(server, "vllm:generation_tokens_total") - before
    assert complete < len(questions) * TOKENS, "the answers were complete before the kill"
    for asked, answer in zip(questions, await answers, strict=True):
        assert answer == asks[asked]


async def test_killing_the_drafter_leaves_the_text_unchanged(server: Server, asks: dict[Ask, tuple[int, ...]]) -> None:
    victims = set(replicas("Draft"))
    await kill_amid("Draft", server, asks)
    assert await eventually(lambda: bool(set(replicas("Draft")) - victims)), "the drafter was not revived"

    async def drafts_again() -> bool:
        before = metric(server, "vllm:spec_decode_num_drafts_total")
        await ask_grpc(server, next(iter(asks)))
        return metric(server, "vllm:spec_decode_num_drafts_total") > before

    for _ in range(20):
        if await drafts_again():
            return
        await asyncio.sleep(1)
    pytest.fail("the revived drafter is not used")


async def test_killing_the_target_leaves_the_text_unchanged(server: Server, asks: dict[Ask, tuple[int, ...]]) -> None:
    await kill_amid("Target", server, asks)
    assert metric(server, "pilotfish:target_replays_total") > 0
