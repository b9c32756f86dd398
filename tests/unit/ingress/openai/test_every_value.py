"""Every place of every body takes any JSON value: it is served or refused by name, and an explicit null is left out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.errors import InvalidRequest
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.http_app import HttpApi

pytestmark = pytest.mark.slow

HALF = "\ud800"
TOOL = {"type": "function", "function": {"name": "swim", "description": "Swims.", "parameters": {"type": "object"}}}
CALLED = {"id": "c", "type": "function", "index": 0, "function": {"name": "swim", "arguments": '{"to": "reef"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "max_tokens": 5,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": False},
    "speculation": {"enabled": True, "max_draft_tokens": 3},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "hi"}]},
    "bad_words": ["word"],
    "request_id": "r",
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": ["hi"], **SAMPLING},
        {"prompt": "hi", "response_format": FORMAT},
        {"prompt": "hi", "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"prompt": "hi", "guided_choice": ["a", "b"]},
        {"prompt": "hi", "guided_json": SCHEMA},
    ],
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "e"}}]},
                {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "done"},
                {"role": "user", "name": "n", "content": "hi"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"a": {"b": ["c"]}},
            "documents": [{"title": "t", "text": {"deep": ["x"]}}],
            "reasoning_effort": "low",
            "stream": True,
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "swim"}},
        },
        {"messages": [{"role": "user", "content": "hi"}], "response_format": FORMAT},
    ],
    "/v1/messages": [
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "so"},
                        {"type": "tool_use", "id": "c", "name": "swim", "input": {"to": None}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "is_error": False,
                            "content": [{"type": "text", "text": "done"}],
                        }
                    ],
                },
            ],
            "tools": [{"type": "custom", "name": "swim", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 3},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
        }
    ],
    "/v1/responses": [
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "i", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "swim", "arguments": "{}", "status": "completed"},
                {"type": "function_call_output", "call_id": "c", "output": "done"},
                {"role": "developer", "content": "so"},
            ],
            "instructions": "be",
            "tools": [{"type": "function", "name": "swim", "strict": True, "description": "d", "parameters": {}}],
            "tool_choice": {"type": "function", "name": "swim"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "metadata": {"a": "b"},
            "max_output_tokens": 5,
        },
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"}},
    ],
    "/tokenize": [
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [TOOL],
            "chat_template_kwargs": {"a": ["b"]},
            "documents": [{"text": "t"}],
        },
        {"prompt": "hi"},
    ],
    "/detokenize": [{"tokens": [5, 6]}],
    "/v1/verify": [
        {
            "request": {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "seed": 1},
            "receipt": {"seed": 1, "fingerprint": "f"},
            "token_ids": [5],
        }
    ],
}
ANYTHING: list[object] = [None, True, -1, 10**30, "", [], [None], {"type": []}, {"": {}}]
FREE = ("metadata", "schema", "parameters", "input_schema", "json", "guided_json", "input", "a", "text", "logit_bias")
"""Parents of places where a null is a value of the client's own."""
Place = tuple[str | int, ...]

CONTEXT = 4096


async def send(api: HttpApi, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a body in ASCII: all that is not is escaped."""
    return await api.http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})


def places(value: object, at: Place = ()) -> Iterator[Place]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*at, key)
        yield from places(entry, (*at, key))


def changed(body: dict[str, Any], place: Place, value: object) -> dict[str, Any]:
    found: Any = (body := copy.deepcopy(body))
    for step in place[:-1]:
        found = found[step]
    found[place[-1]] = value
    return body


CASES = [(path, index) for path, bodies in BODIES.items() for index in range(len(bodies))]


@pytest.mark.parametrize(("path", "index"), CASES)
async def test_no_value_of_any_place_is_an_error_of_the_server(api: HttpApi, path: str, index: int) -> None:
    body = BODIES[path][index]
    assert (response := await send(api, path, body)).status_code == 200, response.text
    for place in places(body):
        for value in ANYTHING:
            response = await send(api, path, changed(body, place, value))
            assert response.status_code in (200, 400, 404), (place, value, response.text)
            if "text/event-stream" in response.headers["content-type"]:
                assert '"error"' not in response.text, (place, value, response.text)


@pytest.mark.parametrize(("path", "index"), CASES)
async def test_half_of_a_surrogate_pair_is_refused_with_the_fields_name(api: HttpApi, path: str, index: int) -> None:
    body = BODIES[path][index]
    for place in places(body):
        for value in (f"a{HALF}", {HALF: 1}, {"a": {"b": [HALF]}}):
            response = await send(api, path, changed(body, place, value))
            assert response.status_code == 400, (place, value, response.text)
            text = response.json()["error"]["message"]
            assert str(place[0]) in text and "surrogate" in text, (place, text)


@pytest.mark.parametrize(("path", "index"), CASES)
async def test_an_explicit_null_counts_as_left_out(api: HttpApi, path: str, index: int) -> None:
    body = BODIES[path][index]
    for place in places(body):
        if isinstance(place[-1], int) or (
            len(place) > 1 and set(place[:-1]) & set(FREE) and place[0] not in ("input",)
        ):
            continue
        without: Any = (rest := copy.deepcopy(body))
        for step in place[:-1]:
            without = without[step]
        del without[place[-1]]
        found, expected = await send(api, path, changed(body, place, None)), await send(api, path, rest)
        assert found.status_code == expected.status_code, (place, found.text, expected.text)


HIDDEN = json.dumps({"a": HALF})
"""JSON whose text is valid, and whose value is not."""


@pytest.mark.parametrize(
    ("path", "values", "field"),
    [
        ("/v1/completions", {"prompt": "hi", "guided_json": HIDDEN}, "guided_json"),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": HIDDEN}}, "structured_outputs.json"),
    ],
)
async def test_half_of_a_pair_that_is_escaped_in_a_text_is_found(
    api: HttpApi, path: str, values: dict[str, Any], field: str
) -> None:
    response = await send(api, path, values)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert "surrogate" in response.json()["error"]["message"]


def chat_of(**fields: Any) -> generation_pb2.GenerateRequest:
    message = generation_pb2.ChatMessage(role="user", content="hi")
    return generation_pb2.GenerateRequest(chat=generation_pb2.ChatInput(messages=[message], **fields))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat_of(tools=[json.dumps({**TOOL, "x": HALF})]), "tools[0]"),
        (chat_of(template_arguments=HIDDEN), "chat_template_kwargs"),
        (
            generation_pb2.GenerateRequest(
                text="hi", sampling=common_pb2.SamplingParameters(grammar=common_pb2.Grammar(json_schema=HIDDEN))
            ),
            "grammar.json_schema",
        ),
    ],
)
async def test_half_of_a_pair_in_the_json_of_a_message_is_refused(
    api: HttpApi, request_: generation_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        async for _ in api.client.generate(request_, 10.0):
            pass
    assert caught.value.field == field


CALLS = r"""<tool_call>{"name": "sw\ud800im", "arguments": {"to": "\udfff"}}</tool_call>
<tool_call>{"arguments": {"to": "\ud83d"}, "name": "swim"}</tool_call>"""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}),
        ("/v1/messages", {**CHAT, "tools": [{"name": "swim", "input_schema": {}}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "swim", "parameters": {}}]}),
    ],
)
async def test_a_model_may_write_half_of_a_pair_into_a_call(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    api = HttpApi(tmp_path, CALLS)
    api.engine.context = 4096
    async with api.http:
        response = await send(api, path, {**body, "stream": stream})
    assert response.status_code == 200, response.text
    # The first name is none of the tools, so the first call is text.
    assert '"name":"swim"' in response.text.replace(": ", ":") and "internal_error" not in response.text
