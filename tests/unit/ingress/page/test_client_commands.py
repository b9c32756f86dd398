"""`pilotfish chat` and `pilotfish complete` over the HTTP API of a scripted engine."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster.core.errors import ConfigurationError, InvalidRequest, WorkerUnavailable
from deploy.commands.client import complete as complete_command
from deploy.commands.client.chat import Interrupts, talk
from deploy.commands.client.connection import ChosenServer, connected, post, stream
from deploy.commands.client.conversation import Conversation
from deploy.commands.client.marked_text import ReceivedAnswer, write_parts
from deploy.network.https_client import lines_of
from deploy.settings import load_settings
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import HttpApi

TEXT = "hello the world"

CONTEXT = 400


def console(*, colours: bool = False) -> Console:
    return Console(file=io.StringIO(), width=500, force_terminal=colours, color_system="standard" if colours else None)


def written(one: Console) -> str:
    return one.file.getvalue()  # type: ignore[attr-defined, no-any-return]


async def converse(api: HttpApi, *lines: str) -> tuple[str, list[str], Conversation]:
    """Type lines into a conversation. Returns the answers, the notices and the conversation."""
    typed: Iterator[str] = iter(lines)

    def read_line() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    conversation, shown, notices = Conversation(), console(), list[str]()
    await talk(api.http, conversation, read_line, shown, notices.append)
    return written(shown), notices, conversation


async def test_a_conversation_keeps_its_messages_and_counts_its_passes(api: HttpApi) -> None:
    shown, notices, conversation = await converse(api, "/tokens 30", "hi", "", "again")
    assert shown == f"{TEXT}\n{TEXT}\n"
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert re.search(r"drafted tokens accepted \(\d+ from the request itself, \d+ from earlier answers\)", notices[1])
    assert f"seed {api.engine.requests[0].sampling.seed}" in notices[1]
    assert len(api.engine.requests[1].prompt) > len(api.engine.requests[0].prompt)


async def test_commands_change_the_next_request(api: HttpApi) -> None:
    await converse(api, "/tokens 30", "/speculation off", "/seed 12", "/temperature 0", "hi", "/speculation on", "hi")
    first, second = api.engine.requests
    assert (first.max_draft_tokens, first.sampling.seed, first.sampling.temperature) == (0, 12, 0.0)
    assert first.stopping.max_tokens == 30
    assert second.max_draft_tokens is None


async def test_the_last_answer_is_verified_from_its_receipt(api: HttpApi) -> None:
    _, notices, conversation = await converse(
        api, "/verify", "/tokens 30", "hi", "/receipt", "/verify", "/new", "/exit", "hi"
    )
    assert notices[0] == "there is no answer yet"
    assert json.loads(notices[3])["target_passes"] > 1
    assert notices[4].startswith("equal: the model writes exactly these ")
    assert (conversation.messages, conversation.has_ended) == ([], True)


async def test_ctrl_c_stops_the_answer_and_twice_ends(api: HttpApi) -> None:
    typed, notices, conversation = ["hi", "again"], list[str](), Conversation(max_tokens=30)
    interrupts = Interrupts(notices.append)

    class Stopping(io.StringIO):
        """Presses Ctrl-C as soon as the first answer has begun."""

        def write(self, text: str) -> int:
            if not self.getvalue() and text.strip():
                interrupts.interrupt()
            return super().write(text)

    def read_line() -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    shown = Console(file=Stopping(), width=500)
    await talk(api.http, conversation, read_line, shown, notices.append, interrupts)
    assert "Ctrl-C again ends" in notices[0]
    first, second = (text for text in written(shown).split("\n") if text)
    assert TEXT.startswith(first) and second == TEXT
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2

    waiting = asyncio.get_running_loop().create_future()
    interrupts.conversation = waiting
    interrupts.interrupt()
    assert not waiting.cancelled()
    interrupts.interrupt()
    assert waiting.cancelled()


async def test_an_error_does_not_end_the_conversation(api: HttpApi) -> None:
    shown, notices, conversation = await converse(api, "/seed many", "/sing", "/tokens 5000", "hi", "/tokens 30", "hi")
    assert shown.strip() == TEXT
    assert "between 0 and 18446744073709551615" in notices[0]
    assert "/help" in notices[1]
    assert "max_tokens" in notices[3]
    assert len(conversation.messages) == 2


@pytest.mark.parametrize("line", ["/speculation maybe", "/temperature -1", "/temperature x", "/tokens 0", "/seed -1"])
def test_wrong_values_are_refused(line: str) -> None:
    conversation = Conversation()
    with pytest.raises(InvalidRequest):
        conversation.command(line)
    assert conversation == Conversation()


async def test_drafted_tokens_are_green_where_there_are_colours(api: HttpApi) -> None:
    shown, answer = console(colours=True), ReceivedAnswer()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "return_drafts": True}
    async for chunk in stream(api.http, "/v1/chat/completions", body):
        answer.add(chunk)
        write_parts(shown, answer)
    assert answer.text == TEXT
    assert "\x1b[32m" in written(shown)
    assert answer.receipt is not None
    assert answer.receipt["accepted"] > 0


def test_where_there_is_no_terminal_the_text_is_exactly_the_models() -> None:
    shown, text = console(), "all:\n\tcc -o a a.c  \r\n\x0b:smile: [b]"
    for part in (text[:6], text[6:]):
        write_parts(shown, ReceivedAnswer(parts=[(part, True)]))
    assert written(shown) == text


async def test_complete_prints_the_text_or_the_response(tmp_path: Path) -> None:
    api, settings = HttpApi(tmp_path, TEXT), load_settings(environment={})
    body = {"prompt": "hi", "max_tokens": 30, "seed": 4}
    async with listening(api.http._transport.app) as address:  # type: ignore[attr-defined]
        plain, whole = console(), console()
        await complete_command.answer(ChosenServer(settings, address), dict(body), plain, as_json=False)
        await complete_command.answer(ChosenServer(settings, address), dict(body), whole, as_json=True)
    assert written(plain) == f"{TEXT}\n"
    response = json.loads(written(whole))
    assert (response["choices"][0]["text"], response["seed"]) == (TEXT, 4)
    assert not api.engine.requests[1].returns_drafts


async def test_one_server_is_named_at_most() -> None:
    with pytest.raises(ConfigurationError, match="--url and --in-process"):
        async with connected(ChosenServer(load_settings(environment={}), "http://127.0.0.1:1", True), print):
            pass


async def test_a_server_that_is_away_is_named() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as client:
        with pytest.raises(WorkerUnavailable, match=r"127\.0\.0\.1:1"):
            async for _ in stream(client, "/v1/completions", {}):
                pass


async def test_a_stream_that_breaks_off_continues_after_its_last_event() -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("last-event-id"))
        end = "id: b\ndata: [DONE]\n\n" if len(seen) == 2 else ""
        event = f'id: a\ndata: {{"choices": [], "seed": {len(seen)}}}\n\n'
        return httpx.Response(200, content=event + end, headers={"content-type": "text/event-stream"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://pilotfish") as client:
        found = [chunk["seed"] async for chunk in stream(client, "/v1/completions", {})]
    assert (found, seen) == ([1, 2], [None, "a"])


def answering(content: bytes, part_bytes: int) -> httpx.AsyncClient:
    """A client of a server that streams these bytes as events, in parts of so many bytes."""

    async def parts() -> AsyncIterator[bytes]:
        for begin in range(0, len(content), part_bytes):
            yield content[begin : begin + part_bytes]

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=parts(), headers={"content-type": "text/event-stream"})

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://pilotfish")


@pytest.mark.parametrize("part_bytes", [1, 7, 1000])
@pytest.mark.parametrize("text", ["one\u2028two", "one\u2029two", "one\x85two", "\u2028", "é\u00a0🐟"])
async def test_a_text_may_hold_characters_that_end_a_line_elsewhere(text: str, part_bytes: int) -> None:
    event = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    async with answering(f"data: {event}\r\n\r\ndata: {event}\n\ndata: [DONE]\n\n".encode(), part_bytes) as client:
        found = [chunk["choices"][0]["text"] async for chunk in stream(client, "/v1/completions", {})]
    assert found == [text, text]


@pytest.mark.parametrize("part_bytes", range(1, 8))
async def test_the_last_line_of_a_stream_needs_no_end(part_bytes: int) -> None:
    content = b"one\r\n\ntwo\r\rthree\r\n\r\nfour"
    async with answering(content, part_bytes) as client, client.stream("GET", "/") as response:
        assert [line async for line in lines_of(response)] == ["one", "", "two", "", "three", "", "four"]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("space", ["", " "])
async def test_a_field_may_have_a_space_before_its_value_and_any_end_of_a_line(space: str, end: str) -> None:
    lines = [f'data:{space}{{"choices": [], "error": null}}', "", f"data:{space}[DONE]", "", ""]
    async with answering(end.join(lines).encode(), 5) as client:
        assert [chunk async for chunk in stream(client, "/v1/completions", {})] == [{"choices": [], "error": None}]


@pytest.mark.parametrize(
    ("error", "words"), [({"message": "too long"}, "too long"), ("too long", "too long"), ({}, "{}"), ("", "")]
)
async def test_an_error_of_any_form_ends_the_answer(error: object, words: str) -> None:
    async with answering(b"data: %b\n\n" % json.dumps({"error": error}).encode(), 100) as client:
        with pytest.raises(WorkerUnavailable, match=f"the server ended the answer with an error: {words}$"):
            await anext(stream(client, "/v1/completions", {}))


@pytest.mark.parametrize("data", [b"hello", b"5", b"[" * 5000, b'{"error": null}', b"{}"])
async def test_what_is_no_event_is_named(data: bytes) -> None:
    async with answering(b"data: %b\n\n" % data, 100) as client:
        with pytest.raises(WorkerUnavailable, match=r"no event; is it the address of an OpenAI-compatible server\?"):
            await anext(stream(client, "/v1/completions", {}))


@pytest.mark.parametrize(("field", "value"), [("prompt", "caf\udce9"), ("temperature", float("nan"))])
async def test_the_server_says_what_is_wrong_with_a_value_that_json_should_not_hold(
    api: HttpApi, field: str, value: object
) -> None:
    body = {"prompt": "hi", field: value}
    with pytest.raises(ConfigurationError, match=f"answered 400: {field}"):
        await post(api.http, "/v1/completions", body)
    with pytest.raises(ConfigurationError, match=f"answered 400: {field}"):
        await anext(stream(api.http, "/v1/completions", {**body, "stream": True}))
