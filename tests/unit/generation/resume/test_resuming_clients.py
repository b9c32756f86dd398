"""The command line's clients continue by themselves after their connection broke."""

from __future__ import annotations

import asyncio
import io
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import WorkerUnavailable
from cluster.ingress.http import create_app
from deploy.commands.client import connection
from deploy.commands.client.connection import ChosenServer, stream
from deploy.commands.demo import MAX_TOKENS, MarkedPrinter, timed_answer
from deploy.commands.generate import Prompt, answer_prompt
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
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 0.1)


async def cut_and_listen_again(connections: CuttableConnections) -> None:
    connections.cut()
    await asyncio.sleep(0.05)
    await connections.start()


async def read_chat(cluster: FakeReplicas, cuts: int) -> list[int]:
    """The tokens of a streamed chat. Its connections are cut after chunks 3, 6 and so on."""
    router = cluster.router()
    async with listening(create_app(router, LimitsSection())) as url:
        connections = CuttableConnections(int(url.rpartition(":")[2]))
        await connections.start()
        tokens: list[int] = []
        count = 0
        async with httpx.AsyncClient(base_url=f"http://{connections.address}", timeout=60.0) as client:
            async for chunk in stream(client, "/v1/chat/completions", BODY):
                tokens.extend(chunk["choices"][0].get("token_ids", ()))
                count += 1
                if count % 3 == 0 and count <= 3 * cuts:
                    await cut_and_listen_again(connections)
        await connections.close()
    return tokens


async def test_a_chat_continues_after_every_cut(tmp_path: Path) -> None:
    async with fake_replicas(tmp_path, 1, step_delay=STEP_SECONDS, draft__method="none") as cluster:
        whole = await read_chat(cluster, cuts=0)
        assert len(whole) == BODY["max_tokens"]
        assert cluster.resumed == []
        assert await read_chat(cluster, cuts=4) == whole
        assert len(cluster.resumed) >= 4


def test_the_demo_marks_drafted_tokens_in_brackets_where_there_is_no_colour() -> None:
    printed = io.StringIO()
    printer = MarkedPrinter(Console(file=printed))
    for text, is_drafted in (("a", False), ("b", True), ("", False), ("c", True), ("d", False), ("e", True)):
        printer.write(text, is_drafted)
    printer.end()
    assert printed.getvalue() == "a[bc]d[e]\n"


async def test_the_demo_times_an_answer_and_says_which_texts_were_drafted(tmp_path: Path) -> None:
    parts: list[tuple[str, bool]] = []
    async with fake_replicas(tmp_path, 1) as cluster:
        router = cluster.router()
        async with listening(create_app(router, LimitsSection())) as url, httpx.AsyncClient(base_url=url) as client:
            answer = await timed_answer(client, "fake", lambda text, is_drafted: parts.append((text, is_drafted)))
    assert 0 < len(answer.tokens) <= MAX_TOKENS
    assert {is_drafted for text, is_drafted in parts if text} == {True, False}
    assert answer.accepted == sum(answer.accepted_by_origin.values()) > 0
    assert answer.first_tokens > 0 and answer.steps < len(answer.tokens)
    assert 0 < answer.first_seconds < answer.first_seconds + answer.seconds


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
    await connections.close()
