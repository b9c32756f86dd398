"""The HTTP API on a real socket, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.ingress import answers
from cluster.ingress.http import create_app
from tests.support.deadline import deadline
from tests.support.fakes.fake_engine import MODEL, ScriptedEngine, listening
from tests.support.fakes.http_app import JSON, HttpApi

LIMITS = LimitsSection(max_body_bytes=65536)
TIMEOUT_SECONDS = 10.0


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    api = HttpApi(tmp_path, limits=LIMITS)
    async with listening(create_app(api.client, LIMITS)) as address:
        yield address, api.engine


@pytest.fixture
async def sdk(served: tuple[str, ScriptedEngine]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openais_client_chats(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1, seed=5
    )
    assert answer.choices[0].message.content == "hello the world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens
    assert answer.model_extra is not None
    assert answer.model_extra["seed"] == 5


async def test_openais_client_understands_the_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "hi"}])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=-1)
    assert invalid.value.param == "temperature"


async def test_the_first_chunk_is_sent_before_the_answer_is_complete(served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    engine.hold_after = 1
    body = {"prompt": "hi", "stream": True}
    async with (
        deadline(TIMEOUT_SECONDS),
        httpx.AsyncClient() as http,
        http.stream("POST", f"{address}/v1/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        event_id, data = await anext(lines), await anext(lines)
        assert event_id.startswith("id: ")
        assert data.startswith("data: {")
        assert engine.freed.empty()


BODIES: dict[str, dict[str, object]] = {
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


def request_for(path: str, *, stream: bool) -> bytes:
    """An HTTP request, as the bytes that its client sends."""
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    head = b"POST /v1/%s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path.encode()
    return head + b"content-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("commits", [0, 1], ids=["before_the_first_word", "after_it"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_disconnects_frees_its_answer(
    served: tuple[str, ScriptedEngine], path: str, stream: bool, commits: int
) -> None:
    address, engine = served
    engine.hold_after = commits
    host, port = address.removeprefix("http://").split(":")
    async with deadline(TIMEOUT_SECONDS):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_for(path, stream=stream))
        arrived = await engine.arrived.get()
        writer.close()
        assert await engine.freed.get() == arrived


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_a_stream_of_comments_frees_its_answer(
    served: tuple[str, ScriptedEngine], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.01)
    address, engine = served
    engine.hold_after = 0
    host, port = address.removeprefix("http://").split(":")
    async with deadline(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_for(path, stream=True))
        arrived = await engine.arrived.get()
        await reader.readuntil(b": keep-alive")
        writer.close()
        assert await engine.freed.get() == arrived


async def test_a_client_that_disconnects_frees_all_its_prompts(served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    engine.hold_after = 1
    async with deadline(TIMEOUT_SECONDS), httpx.AsyncClient() as http:
        body = {"prompt": ["a", "b", "c"], "stream": True}
        async with http.stream("POST", f"{address}/v1/completions", json=body) as response:
            begun: set[int] = set()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    begun |= {choice["index"] for choice in json.loads(line.removeprefix("data: "))["choices"]}
                if len(begun) == 3:
                    break
        await http.aclose()
        assert len({await engine.freed.get() for _ in range(3)}) == 3


async def test_a_body_far_over_the_bound_gets_its_refusal_and_the_next_request_works(
    served: tuple[str, ScriptedEngine],
) -> None:
    address, _ = served
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as http:
        for size in (LIMITS.max_body_bytes + 1, 4 * LIMITS.max_body_bytes):
            response = await http.post(f"{address}/v1/completions", content=b"x" * size, headers=JSON)
            assert response.status_code == 413
        assert (await http.post(f"{address}/v1/completions", json={"prompt": "hi"})).status_code == 200
