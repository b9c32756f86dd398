"""Anthropic's API beyond plain answers: counted tokens, messages of the system, schemas, and errors in its own form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import DeadlineExceeded, NotReady, Overloaded, PilotfishError
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.connections.pacing import PacingMiddleware
from cluster.ingress.endpoints.messages import _parsed
from cluster.ingress.http import create_app
from tests.support.fakes.fake_engine import MODEL, listening
from tests.support.fakes.http_app import HI
from tests.unit.ingress.openai.test_other_apis import TEXT, TOOL, anthropic_client, api_that_writes, prompt_of
from tests.unit.ingress.openai.test_thinking_budget import ThinkingModel

BODY: Any = {"model": MODEL, "max_tokens": 64, "messages": HI}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error in Anthropic's form."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return response.status_code, body["error"]["type"], body["error"]["message"]


async def test_tokens_are_counted_as_the_model_reads_them(tmp_path: Path) -> None:
    import anthropic

    api = api_that_writes(tmp_path, TEXT)
    body: Any = {"model": MODEL, "messages": HI, "system": "Be brief.", "tools": [TOOL]}
    async with anthropic_client(api) as client:
        counted = await client.messages.count_tokens(**body)
        answer = await client.messages.create(**body, max_tokens=64)
        assert counted.input_tokens == answer.usage.input_tokens > 0
        more = await client.messages.count_tokens(**{**body, "messages": [*HI, {"role": "assistant", "content": "a"}]})
        assert more.input_tokens > counted.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await client.messages.count_tokens(model="other", messages=HI)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["hello ", [{"type": "text", "text": "hello "}]])
async def test_the_answer_continues_a_last_message_of_the_assistant(tmp_path: Path, content: Any) -> None:
    api = api_that_writes(tmp_path, TEXT)
    body = {**BODY, "messages": [*HI, {"role": "assistant", "content": content}]}
    answer = await api.post("/v1/messages", **body)
    assert prompt_of(api).endswith("hi<|im_end|>\n<|im_start|>assistant\nhello ")
    del body["max_tokens"]
    counted = await api.post("/v1/messages/count_tokens", **body)
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(("path", "more"), [("", {"max_tokens": 64}), ("/count_tokens", {})])
async def test_an_answer_that_cannot_continue_the_last_message_is_refused(
    tmp_path: Path, path: str, more: dict[str, Any]
) -> None:
    model = ThinkingModel(tmp_path, template="{% for m in messages %}{{ m.content[:2] }}{% endfor %}")
    turns = [*HI, {"role": "assistant", "content": "he"}]
    response = await model.http.post(f"/v1/messages{path}", json={"messages": turns, **more})
    assert error_of(response)[::2] == (
        400,
        "messages[1].role: 'assistant' is refused; it must be user: the model's template changes the last message, so "
        "no answer can continue it",
    )


async def test_a_last_message_with_a_call_is_complete(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    called = [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "c", "name": "swim", "input": {}}]
    turns = [*HI, {"role": "assistant", "content": called}]
    assert (await api.post("/v1/messages", **{**BODY, "messages": turns})).status_code == 200
    assert prompt_of(api).endswith("<|im_end|>\n<|im_start|>assistant\n")


async def test_messages_of_the_system_may_be_anywhere(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Use short words."}]},
        {"role": "user", "content": "one"},
        {"role": "system", "content": "Now shout."},
        {"role": "user", "content": "two"},
    ]
    assert (await api.post("/v1/messages", **{**BODY, "messages": turns}, system="Be brief.")).status_code == 200
    shown = prompt_of(api)
    assert "system\nBe brief.\nUse short words.<|im_end|>\n<|im_start|>user\none<|im_end|>" in shown
    assert "<|im_start|>system\nNow shout.<|im_end|>\n<|im_start|>user\ntwo" in shown


@pytest.mark.parametrize(
    "output",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
async def test_the_schema_of_an_answer_is_applied(tmp_path: Path, output: Any) -> None:
    api = api_that_writes(tmp_path, TEXT)
    response = await api.post("/v1/messages", **BODY, **output)
    assert response.status_code == 200 and "x-ignored-fields" not in response.headers
    grammar = api.engine.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA


async def test_the_effort_reaches_the_template(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    response = await api.post("/v1/messages", **BODY, output_config={"effort": "low", "format": None})
    assert response.status_code == 200
    assert api.engine.requests[-1].sampling.grammar is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": [{"type": "thinking"}]}]}, "messages[0].content"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 1100}]}, "prompt is too long: "),
        ({"max_tokens": 2000}, "maximum context length is 1024 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_anthropics_form(tmp_path: Path, values: Any, words: str, stream: bool) -> None:
    api = api_that_writes(tmp_path, TEXT)
    response = await api.post("/v1/messages", **{**BODY, "stream": stream, **values})
    status, kind, message = error_of(response)
    assert (status, kind) == (400, "invalid_request_error")
    assert words in message


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Overloaded("the queue is full"), 429, "rate_limit_error"),
        (NotReady("draining"), 503, "overloaded_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (PilotfishError("broken"), 500, "api_error"),
    ],
)
async def test_errors_of_the_server_have_anthropics_types(
    tmp_path: Path, refusal: PilotfishError, status: int, kind: str
) -> None:
    api = api_that_writes(tmp_path, TEXT)
    api.engine.refusal = refusal
    assert error_of(await api.post("/v1/messages", **BODY))[:2] == (status, kind)
    api.engine.refusal, api.engine.failure = None, refusal
    last = (await api.post("/v1/messages", **BODY, stream=True)).text.rstrip().rpartition("event: ")[2]
    name, _, data = last.partition("\ndata: ")
    assert (name, json.loads(data)["type"], json.loads(data)["error"]["type"]) == ("error", "error", kind)


async def test_errors_before_the_route_have_anthropics_form(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    assert error_of(await api.post("/v1/messages", **{**BODY, "model": "other"}))[:2] == (404, "not_found_error")
    assert error_of(await api.http.get("/v1/messages"))[:2] == (405, "invalid_request_error")
    assert error_of(await api.post("/v1/messages/none"))[:2] == (404, "not_found_error")
    large = await api.post("/v1/messages", **BODY, padding="x" * 4096)
    assert error_of(large)[:2] == (413, "request_too_large")
    named = await api.http.post("/v1/messages", json=BODY, headers=[(b"x-request-id", "\N{FISH}".encode())])
    assert error_of(named)[:2] == (400, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_not_the_end_of_the_turn(tmp_path: Path, stream: bool) -> None:
    api = api_that_writes(tmp_path, TEXT)
    api.engine.hold_after = 1
    waiting = asyncio.create_task(api.post("/v1/messages", **BODY, stream=stream))
    assert api.engine.abort(await api.engine.arrived.get())
    response = await waiting
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line[:5] == "data:"]
    found = next(one["delta"] for one in events if one["type"] == "message_delta") if stream else response.json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("pause_turn", None)


async def test_callers_without_a_key_get_anthropics_error(tmp_path: Path) -> None:
    import anthropic

    api = api_that_writes(tmp_path, TEXT)
    keys = KeyRing(parse_keys("alice alice-key-0123456789", "keys"))
    async with listening(create_app(api.client, LimitsSection(), keys=keys)) as url, httpx.AsyncClient() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = await http.post(url + path, json=BODY, headers={"x-api-key": "wrong"})
            assert error_of(refused)[:2] == (401, "authentication_error")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="alice-key-0123456789", max_retries=0) as client:
            assert (await client.messages.create(**BODY)).stop_reason == "end_turn"
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="wrong").messages.create(**BODY)


async def test_a_flood_is_refused_in_anthropics_form(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    paced = PacingMiddleware(create_app(api.client, LimitsSection()), most_waiting=0, clock=lambda: 100.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(paced), base_url="http://pilotfish") as http:
        answers = [await http.post("/v1/messages", json=BODY) for _ in range(10)]
    assert error_of(answers[-1])[:2] == (429, "rate_limit_error")


async def test_a_call_with_deep_arguments_can_be_sent_back(tmp_path: Path) -> None:
    """The body of the later request has more levels than the arguments."""
    deep = '{"to": ' + "[" * 59 + "]" * 59 + "}"
    api = api_that_writes(tmp_path, f'<tool_call>{{"name": "swim", "arguments": {deep}}}</tool_call>')
    body = {**BODY, "max_tokens": 400, "tools": [TOOL]}
    answer = (await api.post("/v1/messages", **body)).json()
    (block,) = answer["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"partial_json": deep})
    turns = [*HI, {"role": "assistant", "content": [block]}]
    assert (await api.post("/v1/messages", **{**body, "messages": turns})).status_code == 200
    assert f'"arguments": {deep}}}' in prompt_of(api)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_a_call_with_a_number_that_json_lacks_is_answered_and_can_be_sent_back(
    tmp_path: Path, number: str
) -> None:
    arguments = f'{{"to": [{number}]}}'
    api = api_that_writes(tmp_path, f'<tool_call>{{"name": "swim", "arguments": {arguments}}}</tool_call>')
    body = {**BODY, "max_tokens": 400, "tools": [TOOL]}
    response = await api.post("/v1/messages", **body)
    assert response.status_code == 200, response.text
    (block,) = response.json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"partial_json": arguments})
    turns = [*HI, {"role": "assistant", "content": [block]}]
    assert (await api.post("/v1/messages", **{**body, "messages": turns})).status_code == 200


def test_arguments_of_any_depth_are_read() -> None:
    assert _parsed("[" * 100_000) == {"partial_json": "[" * 100_000}
    assert _parsed('{"a": [1]}') == {"a": [1]}
