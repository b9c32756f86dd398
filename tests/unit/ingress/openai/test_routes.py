"""The routes beside the endpoints of OpenAI's API, and what vLLM's clients read of responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai._streaming import SSEDecoder
from starlette.types import Message

from cluster.core.errors import InvalidRequest, Overloaded
from cluster.generation.service import GenerationService
from cluster.generation.servicer import GenerationServicer
from cluster.generation.text.tokenizer import Tokenizer
from cluster.ingress import answers
from cluster.ingress.asgi import EventStream
from cluster.ingress.http import create_app
from tests.support.fakes.fake_engine import CONTEXT, MODEL, InProcessClient
from tests.support.fakes.http_app import HI, LIMITS, HttpApi, chunks, error_of
from tests.support.models.tiny_tokenizer import byte_level


async def test_text_and_conversations_are_tokenized_and_back(api: HttpApi) -> None:
    found = (await api.post("/tokenize", prompt="hello fish", return_token_strs=True)).json()
    tokens = [*api.tokenizer.encode("hello fish")]
    assert (found["tokens"], found["count"], found["max_model_len"]) == (tokens, len(tokens), CONTEXT)
    assert found["token_strs"] == ["he", "ll", "o", "Ġ", "fish"]  # as the tokenizer spells them
    assert (await api.post("/detokenize", tokens=tokens)).json() == {"prompt": "hello fish"}
    chat = (await api.post("/tokenize", messages=HI, model=MODEL)).json()
    assert api.tokenizer.decode(chat["tokens"], False).endswith("<|im_start|>assistant\n")
    silent = (await api.post("/tokenize", messages=HI, add_generation_prompt=False)).json()
    assert chat["tokens"][: silent["count"]] == silent["tokens"]


async def test_special_tokens_are_added_to_a_text_and_to_a_conversation_only_if_asked(tmp_path: Path) -> None:
    api = HttpApi(tmp_path, tokenizer=Tokenizer.load(byte_level(tmp_path, opens_texts=True)))
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for body, text, by_default in (({"prompt": "hi"}, "hi", True), ({"messages": HI}, rendered, False)):
        with_them, without = ([*api.tokenizer.encode(text, special)] for special in (True, False))
        assert with_them != without
        for special, expected in ((True, with_them), (False, without)):
            found = (await api.post("/tokenize", **body, add_special_tokens=special)).json()
            assert found["tokens"] == expected
        found = (await api.post("/tokenize", **body)).json()
        assert found["tokens"] == (with_them if by_default else without)


async def test_a_refused_token_is_named_as_the_route_names_it(api: HttpApi) -> None:
    refused = await api.post("/detokenize", tokens=[0, 2**31])
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "tokens[1]"
    assert error_of(refused)["message"].startswith("tokens[1]: 2147483648 is refused")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}, {"prompt": "a", "model": "other"}])
async def test_wrong_bodies_to_tokenize_are_refused(api: HttpApi, body: dict[str, Any]) -> None:
    assert error_of(await api.post("/tokenize", **body))["param"] in ("prompt", "model")


async def test_load_balancers_find_health_version_and_load(api: HttpApi) -> None:
    assert (await api.http.head("/health")).status_code == 200
    for method in ("GET", "POST"):
        assert (await api.http.request(method, "/ping")).status_code == 200
    assert set((await api.http.get("/version")).json()) == {"version"}
    assert (await api.http.get("/load")).json() == {"server_load": 0}
    api.engine.hold_after = 0
    waiting = asyncio.create_task(api.complete())
    request_id = await api.engine.arrived.get()
    assert (await api.http.get("/load")).json() == {"server_load": 1}
    assert api.engine.abort(request_id)
    await waiting
    assert (await api.http.get("/load")).json() == {"server_load": 0}
    api.client.reachable = False
    assert (await api.http.head("/health")).status_code == (await api.http.get("/ping")).status_code == 503


async def test_a_model_has_several_names(api: HttpApi) -> None:
    service = GenerationService(api.engine, api.tokenizer, LIMITS, aliases=("other", "gpt-4o"))
    client = InProcessClient(GenerationServicer(service), lambda: True)
    transport = httpx.ASGITransport(create_app(client, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://pilotfish") as http_client:
        cards = (await http_client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
            (name, MODEL, CONTEXT) for name in (MODEL, "other", "gpt-4o")
        ]
        assert (await http_client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            assert (await http_client.post(path, json={**body, "model": "other"})).status_code == 200
            assert (await http_client.post(path, json={**body, "model": "third"})).status_code == 404


async def test_the_reason_of_an_end_is_a_stop_string_or_a_token_that_the_client_named(api: HttpApi) -> None:
    async def reason(**values: Any) -> Any:
        return (await api.complete(**values)).json()["choices"][0]["stop_reason"]

    last = api.tokenizer.encode("hello the world")[-1]
    assert await reason() is None
    assert await reason(stop=" wor") == " wor"
    assert await reason(stop_token_ids=[last]) == last
    assert await reason(max_tokens=1) is None


async def test_usage_has_the_cached_tokens_of_the_prompt(api: HttpApi) -> None:
    usage = (await api.complete()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"messages": HI}, "data: [DONE]\n\n"),
        ("/v1/responses", {"input": "hi"}, "event: error\n"),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, "event: error\n"),
    ],
)
async def test_a_stream_that_waits_for_long_begins_with_comments(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], end: str
) -> None:
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.01)
    generate = api.client.generate

    async def late(*arguments: Any) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.2)
        async for response in generate(*arguments):
            yield response

    monkeypatch.setattr(api.client, "generate", late)
    response = await api.post(path, **body, stream=True)
    comments, comment, events = response.text.rpartition(": keep-alive\n")
    assert comment and set(comments.split("\n")) <= {": keep-alive", ""}
    assert "hello" in events and '"error":{' not in events.replace(" ", "")
    api.engine.refusal = Overloaded("full", 1.0)
    refused = await api.post(path, **body, stream=True)
    assert refused.status_code == 200
    assert "rate_limit" in refused.text and end in refused.text
    monkeypatch.setattr(answers, "SILENT_SECONDS", 10.0)
    api.engine.refusal = InvalidRequest("max_tokens", 9, "less")
    for stream in (False, True):  # what is refused at once has its status
        assert (await api.post(path, **body, stream=stream)).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
async def test_a_client_that_leaves_before_the_first_step_of_a_stream_that_waits_frees_its_answer(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.01)
    freed, calls = [], 0

    async def waiting(*_: Any) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            freed.append(path)

    async def receive() -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            return {"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}
        if calls == 2:
            await asyncio.Event().wait()  # the client is there until the response begins
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        await asyncio.sleep(0)  # a connection that waits before it takes more

    monkeypatch.setattr(api.client, "generate", waiting)
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [(b"host", b"pilotfish")]}
    await create_app(api.client, LIMITS)(scope, receive, send)
    assert (freed, calls) == ([path], 3)


async def test_no_comment_is_sent_while_events_come(api: HttpApi) -> None:
    assert chunks(await api.chat(stream=True))
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    sent = await _sent_until(events(), 3)
    assert sent == [b"a", b": keep-alive\n", b": keep-alive\n"]
    assert closed  # also when the client leaves


async def test_a_comment_between_events_is_no_event_for_the_client_of_openai() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b'id: a-1\ndata: {"x": 1}\n\n'
        await asyncio.sleep(0.05)
        yield b'id: a-2\ndata: {"x": 2}\n\n'

    sent = await _sent_until(events(), None)
    assert b": keep-alive\n" in sent
    assert [event.data for event in SSEDecoder().iter_bytes(iter(sent))] == ['{"x": 1}', '{"x": 2}']


async def test_no_comment_is_sent_while_the_client_does_not_take_an_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"

    assert await _sent_until(events(), None, slow=0.05) == [b"a", b""]


async def test_an_error_of_the_events_ends_the_response() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        await _sent_until(events(), None)


async def _sent_until(events: AsyncGenerator[bytes, None], count: int | None, slow: float = 0.0) -> list[bytes]:
    """The parts of a body that is sent to a client that leaves after `count` of them, and takes `slow` s for each."""
    parts: list[bytes] = []
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and len(parts) != count:
            await asyncio.sleep(slow)
            parts.append(message["body"])
        if len(parts) == count:
            left.set()

    stream = EventStream(events, silent_seconds=0.01, end=lambda: asyncio.sleep(0))
    await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    return parts
