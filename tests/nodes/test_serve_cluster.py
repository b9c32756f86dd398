"""The whole cluster under Ray Serve: three ranks that restart together, two drafters, and a clean shutdown.

The model is tiny and random, so the tests cover the cluster and not the quality of answers. Answers are compared with a
cluster of one rank without drafts in this process, and with `generate` of `transformers`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from deploy.local.local_cluster import LocalCluster
from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import Settings
from tests.support.clusters.live_cluster import RequestCase, Server, answer_all, tokens_grpc
from tests.support.clusters.serve_process import Deploy, ServeProcess
from tests.support.models import drafting_modules, tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.ray

TIMEOUT_SECONDS = 120.0
"""Seconds. Longer than any test takes, so that a hang becomes a failure."""
DRAFTER = "ray::ServeReplica:pilotfish:Draft"
"""What the processes of drafters are called."""
REPLICA = "ray::ServeReplica:pilotfish:Target"
"""What the process of a target's replica, its coordinator, is called."""
PROMPT = tuple(range(40, 60))
GREEDY = RequestCase(PROMPT, max_tokens=200)
SAMPLED = RequestCase(PROMPT, max_tokens=200, temperature=1.0, seed=20)
LONG = RequestCase(PROMPT, max_tokens=900, temperature=1.0, seed=20)
SEVERAL = [RequestCase(PROMPT[:length], max_tokens=40, seed=length, temperature=length % 2) for length in range(2, 12)]
Expected = dict[RequestCase, tuple[int, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=1024))
    return tiny_tokenizer.byte_level(directory)


@pytest.fixture(scope="module")
def draft_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.blur(model, tmp_path_factory.mktemp("draft"), noise=0.05)


def configure(model: Path, **changes: object) -> Configuration:
    overrides = {
        "target.path": str(model),
        "target.device": "cpu",
        "target.kv.pool_bytes": 8 << 20,
        "server.http_port": 0,
        "server.grpc_port": 0,
        "server.start_timeout_seconds": TIMEOUT_SECONDS,
        "server.demo": "on",
        "draft.timeout_seconds": 5.0,
    }
    return load_configuration({}, overrides | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture
def cluster(deploy: Deploy, model: Path) -> ServeProcess:
    """Three ranks and prompt lookup."""
    return deploy(configure(model, target__tensor_parallel=3))


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    """The answers of one rank without drafts."""

    async def answers(configuration: Configuration) -> Expected:
        async with LocalCluster(configuration) as local:
            server = Server(local.grpc_address, "")
            return {case: await tokens_grpc(server, case) for case in (GREEDY, SAMPLED, LONG, *SEVERAL)}

    return asyncio.run(answers(configure(model, draft__method="none")))


@pytest.fixture
async def deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        yield


async def kill_during_answer(
    cluster: ServeProcess, case: RequestCase, title: str, *, frozen: bool = False
) -> tuple[int, ...]:
    """An answer during which a worker is killed, or stops for ever."""
    # A standby rank is younger than the one that serves.
    victims = sorted(cluster.descendants(title), key=lambda process: process.create_time())
    assert victims, f"no process is called {title}"
    asking = asyncio.create_task(tokens_grpc(cluster.server, case))
    await asyncio.sleep(0.2)
    assert not asking.done(), "the answer was complete before the kill"
    if frozen:
        victims[0].suspend()
    else:
        victims[0].kill()
    return await asking


def test_greedy_answers_are_those_of_transformers(model: Path, expected: Expected) -> None:
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPT])

    written = alone.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )

    assert expected[GREEDY] == tuple(written[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("case", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_three_ranks_and_drafts_change_no_token_over_either_api(
    cluster: ServeProcess, expected: Expected, case: RequestCase, deadline: None
) -> None:
    answers = await answer_all(cluster.server, [case] * 4, concurrency=4)

    assert [answer.tokens for pair in answers for answer in pair] == [expected[case]] * 8


async def test_the_http_api_answers(cluster: ServeProcess, deadline: None) -> None:
    async with httpx.AsyncClient(base_url=cluster.server.http_url) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert "vllm:" in (await client.get("/metrics")).text


async def test_a_request_id_is_returned_and_one_outside_ascii_is_refused(cluster: ServeProcess, deadline: None) -> None:
    async with httpx.AsyncClient(base_url=cluster.server.http_url) as client:
        for headers in ({}, {"x-request-id": "my-1"}):
            returned = (await client.get("/health", headers=headers)).headers.get_list("x-request-id")
            assert len(returned) == 1
            assert returned[0] == headers.get("x-request-id", returned[0])
        refused = await client.get("/health", headers={"x-request-id": b"\xff"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-id")


async def test_a_killed_rank_changes_no_token(cluster: ServeProcess, expected: Expected, deadline: None) -> None:
    assert await kill_during_answer(cluster, SAMPLED, "WorkerRank") == expected[SAMPLED]


async def test_a_rank_that_hangs_is_replaced_after_the_steps_timeout_and_changes_no_token(
    deploy: Deploy, model: Path, expected: Expected, deadline: None
) -> None:
    cluster = deploy(configure(model, target__tensor_parallel=3, target__step_timeout_seconds=5.0))
    assert await kill_during_answer(cluster, SAMPLED, "WorkerRank", frozen=True) == expected[SAMPLED]


async def test_two_drafters_share_the_requests_and_one_serves_all_when_the_other_dies(
    deploy: Deploy, model: Path, draft_model: Path, expected: Expected
) -> None:
    pool = {"draft__replicas": 2, "draft__method": "model", "draft__controller": "off"}
    section = {
        "draft__model__path": str(draft_model),
        "draft__model__device": "cpu",
        "draft__model__kv__pool_bytes": 4 << 20,
    }
    cluster = deploy(configure(model, **pool, **section))
    _, second = cluster.descendants(DRAFTER)

    async with asyncio.timeout(TIMEOUT_SECONDS):
        both = await answer_all(cluster.server, SEVERAL, concurrency=5)
        second.kill()
        one = await answer_all(cluster.server, SEVERAL, concurrency=5)

    for answers in (both, one):
        for case, pair in zip(SEVERAL, answers, strict=True):
            assert [answer.tokens for answer in pair] == [expected[case]] * 2
    assert all(answer.accepted > 0 for pair in both for answer in pair)
    assert sum(answer.accepted > 0 for pair in one for answer in pair) > len(SEVERAL)


async def test_a_drafter_learns_from_answers_and_changes_no_token(
    deploy: Deploy, model: Path, tmp_path: Path, expected: Expected
) -> None:
    """The learner in the drafter's process sees the answers of clients that agree. The heads are random."""
    drafting_modules.save(model, tmp_path / "heads", "heads", (2,))
    heads = {"draft__method": "heads", "draft__heads__path": str(tmp_path / "heads"), "draft__controller": "off"}
    learning = {"draft__learn": "on", "draft__learn_from": "all", "draft__placement": "drafter"}
    cluster = deploy(configure(model, **heads, **learning))
    assert len(cluster.descendants(DRAFTER)) == 1

    async with asyncio.timeout(TIMEOUT_SECONDS), httpx.AsyncClient(base_url=cluster.server.http_url) as client:
        seen = asked = 0
        while seen < len(SEVERAL):
            answers = await answer_all(cluster.server, SEVERAL, concurrency=5)
            asked += 2 * len(SEVERAL)
            for case, pair in zip(SEVERAL, answers, strict=True):
                assert [answer.tokens for answer in pair] == [expected[case]] * 2
                assert all(answer.drafted > 0 for answer in pair)
            (replica,) = (await client.get("/cluster")).json()["replicas"]
            seen = replica["draft_learned_texts"]

    assert seen <= asked


async def check_the_kill_button(cluster: ServeProcess, expected: Expected) -> None:
    """The page's button kills the drafter during an answer, which stays the same; Serve starts another drafter."""
    (killed,) = cluster.descendants(DRAFTER)
    async with httpx.AsyncClient(base_url=cluster.server.http_url) as client:
        assert (await client.get("/page/settings.json")).json()["can_kill_drafter"]
        asking = asyncio.create_task(tokens_grpc(cluster.server, SAMPLED))
        await asyncio.sleep(0.1)
        answer = await client.post("/demo/kill-drafter", json={})
        assert not asking.done(), "the answer was complete before the kill"
    assert (answer.status_code, answer.json()) == (200, {"killed": 1})
    assert await asking == expected[SAMPLED]
    await asyncio.to_thread(killed.wait, TIMEOUT_SECONDS)
    drafted = False
    while not drafted:  # until another drafter serves
        await asyncio.sleep(0.1)
        (answers,) = await answer_all(cluster.server, [GREEDY], concurrency=1)
        drafted = any(answer.accepted > 0 for answer in answers)
    (again,) = cluster.descendants(DRAFTER)
    assert again.pid != killed.pid


async def test_the_page_kills_the_drafter_during_an_answer(deploy: Deploy, model: Path, expected: Expected) -> None:
    drafting = {"draft__method": "ngram", "draft__placement": "drafter", "draft__controller": "off"}
    cluster = deploy(configure(model, **drafting))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await check_the_kill_button(cluster, expected)


def test_a_port_in_use_is_reported_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"server\.http_port: needed 127\.0\.0\.1:{port} free"):
            ServeCluster(Settings(configure(model, server__http_port=port), tmp_path), report=lambda _: None).start()


async def test_a_replica_that_replaces_a_killed_one_starts_with_the_waiting_rank_and_changes_no_token(
    deploy: Deploy, model: Path, expected: Expected, deadline: None
) -> None:
    cluster = deploy(configure(model))
    before = await first_ranks(cluster)
    assert await kill_during_answer(cluster, LONG, REPLICA) == expected[LONG]
    (serving,) = before & {process.pid for process in cluster.descendants("FirstRank")}
    assert psutil.Process(serving).net_connections(), "the rank that waited listens"


async def check_drafts_on_the_target(cluster: ServeProcess, expected: Expected) -> None:
    """There is no drafter; drafts are accepted. The same answer comes although a rank is killed, from standby ranks."""
    assert not cluster.descendants(DRAFTER)
    (pair,) = await answer_all(cluster.server, [GREEDY], concurrency=1)
    assert [answer.tokens for answer in pair] == [expected[GREEDY]] * 2
    assert all(answer.accepted > 0 for answer in pair)
    before = await first_ranks(cluster)
    assert await kill_during_answer(cluster, SAMPLED, "WorkerRank") == expected[SAMPLED]
    assert len(before & await first_ranks(cluster)) == 1, "the standby rank serves, and a new one is on standby"


async def first_ranks(cluster: ServeProcess) -> set[int]:
    """The process ids of the driver rank and of its standby process, once both exist."""
    for _ in range(round(TIMEOUT_SECONDS / 0.1)):
        found = {process.pid for process in cluster.descendants("FirstRank")}
        if len(found) == 2:
            return found
        await asyncio.sleep(0.1)
    raise TimeoutError("there is no standby process")


async def test_a_stopped_cluster_and_a_failed_start_leave_no_process_behind(
    deploy: Deploy, model: Path, expected: Expected
) -> None:
    drafting = {"draft__method": "suffix", "draft__placement": "target", "draft__controller": "off"}
    cluster = deploy(configure(model, target__tensor_parallel=3, target__standby=True, **drafting))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await check_drafts_on_the_target(cluster, expected)
    cluster.drain()
    cluster.stop()
    assert not cluster.descendants("ray")

    with pytest.raises(WorkerUnavailable, match=r"target did not start: target\.max_context_len: 100000 is"):
        cluster.start(configure(model, target__max_context_len=100_000))
    assert not cluster.descendants("ray")
