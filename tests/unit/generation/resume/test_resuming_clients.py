"""The command line's clients continue by themselves after their connection broke."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import WorkerUnavailable
from cluster.ingress.http import create_app
from deploy.commands import streamed_answer
from deploy.commands.client import connection
from deploy.commands.client.connection import ChosenServer
from deploy.commands.generate import Prompt, answer_prompt
from deploy.commands.streamed_answer import Chunk, stream_chat
from deploy.settings import load_settings
from tests.support.clusters.fake_coordinators import CuttableConnections, FakeReplicas, fake_replicas
from tests.support.fakes.fake_engine import listening

STEP_SECONDS = 0.004
BODY: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 60,
    "seed": 3,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients try again after a tenth of a second."""
    for module in (connection, streamed_answer):
        monkeypatch.setattr(module, "_RETRY_SECONDS", 0.1)


async def cut_and_listen_again(connections: CuttableConnections) -> None:
    connections.cut()
    await asyncio.sleep(0.05)
    await connections.start()


async def read_chat(cluster: FakeReplicas, cuts: int) -> list[int]:
    """The tokens that the demo's client reads in a thread. Its connections are cut after chunks 3, 6 and so on."""
    router, loop = cluster.router(), asyncio.get_running_loop()
    async with listening(create_app(router, LimitsSection())) as url:
        connections = CuttableConnections(int(url.rpartition(":")[2]))
        await connections.start()
        tokens: list[int] = []

        def read() -> None:
            for count, chunk in enumerate(stream_chat(f"http://{connections.address}", BODY, 60.0), start=1):
                assert isinstance(chunk, Chunk)
                tokens.extend(chunk.tokens)
                if count % 3 == 0 and count <= 3 * cuts:
                    asyncio.run_coroutine_threadsafe(cut_and_listen_again(connections), loop).result()

        await asyncio.to_thread(read)
        await connections.close()
    await router.close()
    return tokens


async def test_the_client_of_the_demo_continues_after_every_cut(tmp_path: Path) -> None:
    async with fake_replicas(tmp_path, 1, step_delay=STEP_SECONDS, draft__method="none") as cluster:
        whole = await read_chat(cluster, cuts=0)
        assert len(whole) == BODY["max_tokens"]
        assert cluster.resumed == []
        assert await read_chat(cluster, cuts=4) == whole
        assert len(cluster.resumed) >= 4


async def test_generate_continues_after_every_cut(tmp_path: Path) -> None:
    prompt = Prompt("hello", max_tokens=60, temperature=1.0, seed=3)
    async with fake_replicas(tmp_path, 1, step_delay=STEP_SECONDS, draft__method="none") as cluster:
        texts, cuts, router = [], 0, cluster.router()
        for interval in (0, 12):
            stack = AsyncExitStack()
            http = await stack.enter_async_context(listening(create_app(router, LimitsSection())))
            connections = CuttableConnections(int(http.rpartition(":")[2]))
            await connections.start()
            written: list[str] = []
            pending: list[asyncio.Task[None]] = []

            def write(
                text: str,
                written: list[str] = written,
                pending: list[asyncio.Task[None]] = pending,
                interval: int = interval,
                connections: CuttableConnections = connections,
            ) -> None:
                written.append(text)
                if interval and len(written) % interval == 0 and all(task.done() for task in pending):
                    pending.append(asyncio.create_task(cut_and_listen_again(connections)))

            notices: list[str] = []
            url = f"http://{connections.address}"
            await answer_prompt(ChosenServer(load_settings(), url), prompt, write, notices.append)
            await asyncio.gather(*pending)
            await connections.close()
            await stack.aclose()
            texts.append("".join(written))
            cuts += len(pending)
        await router.close()
        assert texts[0] == texts[1]
        assert cuts > 1
        assert "60 tokens" in notices[-1]


async def test_a_server_that_was_never_reached_is_an_error_at_once(tmp_path: Path) -> None:
    connections = CuttableConnections(1)
    await connections.start()
    connections.cut()
    server = ChosenServer(load_settings(), f"http://{connections.address}")
    with pytest.raises(WorkerUnavailable, match="the connection is refused"):
        await answer_prompt(server, Prompt("hello"), print, print)
    failed = threading.Event()

    def read() -> None:
        with pytest.raises(WorkerUnavailable):
            list(stream_chat(f"http://{connections.address}", BODY, 60.0))
        failed.set()

    await asyncio.to_thread(read)
    assert failed.is_set()
    await connections.close()
