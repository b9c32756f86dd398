"""The whole cluster under Ray Serve: three ranks that live and die together, and nothing left behind.

The model is tiny and random, so that what is tested is the machinery; answers are compared with a cluster of one
rank without drafts in this process, and with `generate` of `transformers`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config import Configuration
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from deploy.local.local_cluster import LocalCluster
from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import Settings
from tests.support import tiny, tiny_tokenizer
from tests.support.live_cluster import Ask, Server, ask_grpc
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.ray

TOO_LONG_SECONDS = 120.0
"""No test takes this long; it only turns a hang into a failure."""
PROMPT = tuple(range(40, 60))
GREEDY = Ask(PROMPT, max_tokens=200)
SAMPLED = Ask(PROMPT, max_tokens=200, temperature=1.0, seed=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=1024))
    return tiny_tokenizer.byte_level(directory)


def settings(model: Path, **changes: object) -> Settings:
    overrides = {
        "target.path": str(model),
        "target.device": "cpu",
        "target.kv.pool_bytes": 8 << 20,
        "server.http_port": 0,
        "server.grpc_port": 0,
        "server.start_timeout_seconds": TOO_LONG_SECONDS,
        "draft.timeout_seconds": 5.0,
    }
    overrides.update({key.replace("__", "."): value for key, value in changes.items()})
    return Settings(load_configuration({}, overrides), model.parent)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ServeCluster]:
    with ServeCluster(settings(model, target__tensor_parallel=3), report=lambda _: None) as running:
        yield running


@pytest.fixture
def server(cluster: ServeCluster) -> Server:
    return Server(cluster.grpc_address, cluster.http_url)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Ask, tuple[int, ...]]:
    """What one rank without drafts answers."""

    async def ask(configuration: Configuration) -> dict[Ask, tuple[int, ...]]:
        async with LocalCluster(configuration) as local:
            return {asked: await ask_grpc(Server(local.grpc_address, ""), asked) for asked in (GREEDY, SAMPLED)}

    return asyncio.run(ask(settings(model, draft__method="none").configuration))


@pytest.fixture
async def deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(TOO_LONG_SECONDS):
        yield


def descendants(title: str) -> list[psutil.Process]:
    """Processes below this one whose title holds the words."""
    return [child for child in psutil.Process().children(recursive=True) if title in " ".join(_command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def ask_and_kill(server: Server, asked: Ask, title: str) -> tuple[int, ...]:
    """An answer during which a worker is killed."""
    victims = descendants(title)
    assert victims, f"no process is called {title}"
    asking = asyncio.create_task(ask_grpc(server, asked))
    await asyncio.sleep(0.2)
    assert not asking.done(), "the answer was complete before anything could be killed"
    victims[0].kill()
    return await asking


def test_greedy_answers_are_those_of_transformers(model: Path, expected: dict[Ask, tuple[int, ...]]) -> None:
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


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_three_ranks_and_drafts_change_no_token(
    server: Server, expected: dict[Ask, tuple[int, ...]], asked: Ask, deadline: None
) -> None:
    answers = await asyncio.gather(*(ask_grpc(server, asked) for _ in range(4)))

    assert answers == [expected[asked]] * 4


async def test_the_http_door_is_open(server: Server, deadline: None) -> None:
    async with httpx.AsyncClient(base_url=server.http_url) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert "vllm:" in (await client.get("/metrics")).text


async def test_a_killed_rank_changes_no_token(
    server: Server, expected: dict[Ask, tuple[int, ...]], deadline: None
) -> None:
    assert await ask_and_kill(server, SAMPLED, "WorkerRank") == expected[SAMPLED]


def test_an_application_can_be_replaced_and_leaves_no_process_behind(
    model: Path, expected: dict[Ask, tuple[int, ...]], cluster: ServeCluster
) -> None:
    cluster.redeploy(settings(model, draft__method="none").configuration)
    answer = asyncio.run(ask_grpc(Server(cluster.grpc_address, ""), GREEDY))
    cluster.drain()
    cluster.stop()

    assert answer == expected[GREEDY]
    assert not descendants("ray")


def test_a_port_in_use_is_told_before_anything_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"server\.http_port: needed 127\.0\.0\.1:{port} free"):
            ServeCluster(settings(model, server__http_port=port), report=lambda _: None).start()


def test_a_worker_that_cannot_start_ends_everything_with_its_own_words(model: Path) -> None:
    broken = settings(model, target__max_context_len=100_000)

    with pytest.raises(WorkerUnavailable, match=r"target did not start: target\.max_context_len: 100000 is refused"):
        ServeCluster(broken, report=lambda _: None).start()

    assert not descendants("ray")
