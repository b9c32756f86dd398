"""OpenAI's responses and Anthropic's messages, with their own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import DeadlineExceeded, InvalidRequest
from cluster.ingress.endpoints.responses import Conversations
from cluster.ingress.http import create_app
from cluster.ingress.openai.errors import error_response
from tests.support.fakes.fake_engine import MODEL, listening
from tests.support.fakes.http_app import HI, HttpApi, api_that_writes, error_of, openai_client, prompt_of

if TYPE_CHECKING:
    import anthropic

TEXT = "hello the world"
CALL = 'Yes. <tool_call>{"name": "swim", "arguments": {"to": "the world"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}}}
FUNCTION: Any = {"type": "function", "name": "swim", "parameters": PARAMETERS, "strict": False}
TOOL: Any = {"name": "swim", "input_schema": PARAMETERS}
HOSTED, WRONG = {"type": "web_search"}, {**FUNCTION, "parameters": {"type": "fish"}}


@asynccontextmanager
async def anthropic_client(api: HttpApi) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic  # 3,000 modules, which processes that only collect tests do not need

    async with (
        listening(create_app(api.client, LimitsSection())) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_response_is_whole_or_streamed_and_the_same(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    async with openai_client(api) as client:
        whole = await client.responses.create(model=MODEL, input="hi", instructions="Be brief.")
        assert (whole.output_text, whole.status, whole.model) == (TEXT, "completed", MODEL)
        assert whole.usage is not None and whole.usage.output_tokens == len(api.tokenizer.encode(TEXT)) + 1
        assert "system\nBe brief.<|im_end|>\n<|im_start|>user\nhi" in prompt_of(api)
        kinds, text, final = [], "", None
        async for event in await client.responses.create(model=MODEL, input="hi", stream=True):
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.completed":
                final = event.response
        assert text == TEXT and final is not None and final.output_text == TEXT
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_response_is_cancelled_and_has_not_reached_its_length(tmp_path: Path, stream: bool) -> None:
    api = api_that_writes(tmp_path, TEXT)
    api.engine.hold_after = 1
    waiting = asyncio.create_task(api.post("/v1/responses", input="hi", stream=stream))
    assert api.engine.abort(await api.engine.arrived.get())
    response = await waiting
    last = json.loads(response.text.rstrip().rpartition("data: ")[2])
    assert not stream or last["type"] == "response.incomplete"
    found = last["response"] if stream else last
    assert (found["status"], found["incomplete_details"]) == ("cancelled", None)
    assert found["output"][-1]["status"] == "incomplete"


async def test_a_response_continues_an_earlier_one_while_it_is_kept(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    async with openai_client(api) as client:
        first = await client.responses.create(model=MODEL, input="one", instructions="Be brief.")
        await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        shown = prompt_of(api)
        assert f"user\none<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>user\ntwo" in shown
        assert "brief" not in shown
        loose = await client.responses.create(model=MODEL, input="three", store=False)
        with pytest.raises(openai.BadRequestError, match="still keeps"):
            await client.responses.create(model=MODEL, input="four", previous_response_id=loose.id)


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_instructions_and_what_the_system_says_first_are_one_message(tmp_path: Path, role: str) -> None:
    """Templates refuse a second message of the system, or leave it out."""
    api = api_that_writes(tmp_path, TEXT)
    turns = [{"role": role, "content": "Use short words."}, *HI, {"role": role, "content": "Now shout."}]
    assert (await api.post("/v1/responses", input=turns, instructions="Be brief.")).status_code == 200
    assert prompt_of(api).startswith("<|im_start|>system\nBe brief.\nUse short words.<|im_end|>\n<|im_start|>user\nhi")
    assert "<|im_start|>system\nNow shout." in prompt_of(api)


async def test_a_response_calls_functions(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    async with openai_client(api) as client:
        answer = await client.responses.create(model=MODEL, input="hi", tools=[FUNCTION])
        message, call = answer.output
        assert message.type == "message" and answer.output_text == "Yes."
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("swim", {"to": "the world"})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        await client.responses.create(model=MODEL, input=[result], previous_response_id=answer.id, tools=[FUNCTION])
        assert "<|im_start|>tool\ndone" in prompt_of(api)
        arguments = ""
        async for event in await client.responses.create(model=MODEL, input="hi", tools=[FUNCTION], stream=True):
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        assert arguments == call.arguments


async def test_what_openai_alone_can_do_is_left_out_of_a_response_and_named(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    body = {
        "input": [{"role": "user", "content": "hi"}, search],
        "include": ["reasoning.encrypted_content"],
        "tools": [FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "x"}],
        "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "top_logprobs": 2,
    }
    response = await api.post("/v1/responses", **body)
    assert response.status_code == 200
    assert '"name": "swim"' in prompt_of(api) and "web_search" not in prompt_of(api)
    assert response.headers["x-ignored-fields"].split(", ") == [
        "tools.web_search",
        "tools.custom",
        "include.reasoning.encrypted_content",
        "input.web_search_call",
        "reasoning.summary",
        "text.verbosity",
        "top_logprobs",
    ]
    assert "x-ignored-fields" not in (await api.post("/v1/responses", input="hi")).headers


async def test_every_field_without_effect_is_named(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    chat = await api.chat(user="me", metadata={"a": "b"}, temperature=1)
    assert chat.headers["x-ignored-fields"].split(", ") == ["user", "metadata"]
    response = await api.post("/v1/responses", input="hi", prompt_cache_key="x")
    assert response.headers["x-ignored-fields"] == "prompt_cache_key"
    form = {"type": "json_schema", "schema": PARAMETERS}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    turns = [*HI, {"role": "assistant", "content": [search, {"type": "text", "text": "found"}]}]
    body = {"max_tokens": 9, "messages": turns, "tools": [TOOL], "tool_choice": {"type": "any"}}
    message = await api.post("/v1/messages", **body, output_config={"format": form}, metadata={"user_id": "me"})
    assert message.status_code == 200
    names = message.headers["x-ignored-fields"].split(", ")
    assert sorted(names) == ["messages.server_tool_use", "metadata", "output_config.format"]


async def test_a_response_has_the_log_probabilities_of_its_text(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    body: Any = {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    tokens = [*api.tokenizer.encode(TEXT), 2]
    async with openai_client(api) as client:
        whole = await client.responses.create(**body)
        (message,) = whole.output
        assert message.type == "message" and message.content[0].type == "output_text"
        scored = message.content[0].logprobs
        assert scored is not None and len(scored) == len(tokens)
        assert "".join(entry.token for entry in scored).startswith(TEXT)
        assert {len(entry.top_logprobs) for entry in scored} == {2}
        streamed: list[Any] = []
        async for event in await client.responses.create(**body, stream=True):
            if event.type == "response.output_text.delta":
                streamed += event.logprobs
            if event.type == "response.output_text.done":
                assert len(event.logprobs) == len(tokens)
        assert [entry.token for entry in streamed] == [entry.token for entry in scored[: len(streamed)]]
        assert "".join(entry.token for entry in streamed) == TEXT


async def test_a_call_that_a_stop_cuts_is_not_the_reason_of_the_end(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    body = {"max_tokens": 200, "messages": HI, "tools": [TOOL], "stop_sequences": ["the"]}
    answer = (await api.post("/v1/messages", **body)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "the")
    assert [block["type"] for block in answer["content"]] == ["text"]


async def test_a_message_is_whole_or_streamed_and_the_same(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    body: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}], "system": "Brief."}
    async with anthropic_client(api) as client:
        whole = await client.messages.create(**body)
        (block,) = whole.content
        assert block.type == "text"
        assert (block.text, whole.stop_reason, whole.role) == (TEXT, "end_turn", "assistant")
        assert whole.usage.output_tokens == len(api.tokenizer.encode(TEXT)) + 1
        assert "system\nBrief.<|im_end|>" in prompt_of(api)
        async with client.messages.stream(**body) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
            final = await stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
        stopped = await client.messages.create(**body, stop_sequences=[" wor"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " wor")
        cut = await client.messages.create(**{**body, "max_tokens": 1})
        assert cut.stop_reason == "max_tokens"


async def test_a_message_calls_tools_and_their_results_are_sent_back(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    async with anthropic_client(api) as client:
        answer = await client.messages.create(model=MODEL, max_tokens=200, messages=turns, tools=[TOOL])
        text, call = answer.content
        assert (text.type, call.type, answer.stop_reason) == ("text", "tool_use", "tool_use")
        assert call.type == "tool_use" and (call.name, call.input) == ("swim", {"to": "the world"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(model=MODEL, max_tokens=200, messages=turns, tools=[TOOL]) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[1].type == "tool_use" and final.content[1].input == {"to": "the world"}
    assert "<|im_start|>tool\ndone" in prompt_of(api)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"input": "a", "tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "a", "tool_choice": {"type": "function", "name": "swim"}}, "tool_choice"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "a", "background": True}, "background"),
        ("responses", {"input": "a", "tools": [HOSTED, {**FUNCTION, "name": ""}]}, "tools[1].name"),
        ("responses", {"input": "a", "tools": [HOSTED, WRONG], "tool_choice": "required"}, "tools[1].parameters"),
        ("responses", {"input": "a", "previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(tmp_path: Path, path: str, body: Any, field: str) -> None:
    api = api_that_writes(tmp_path, TEXT)
    assert error_of(await api.post(f"/v1/{path}", **body))["param"] == field


async def test_an_error_in_mid_stream_is_an_event(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    api.engine.failure = DeadlineExceeded("late")
    turns = [{"role": "user", "content": "hi"}]
    for path, body in (("responses", {"input": "hi"}), ("messages", {"max_tokens": 64, "messages": turns})):
        response = await api.post(f"/v1/{path}", **body, stream=True)
        assert response.status_code == 200
        assert response.text.rstrip().rpartition("event: ")[2].startswith("error\n")


async def test_errors_have_all_their_fields_before_and_in_a_stream(tmp_path: Path) -> None:
    """One that is added to `ErrorResponse` reaches every API but Anthropic's, which has its own."""
    api = api_that_writes(tmp_path, TEXT)
    failure = DeadlineExceeded("late")
    own, anthropics = set(error_response(failure).fields), {"type", "message"}
    wanted: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
        "chat/completions": ({"messages": HI}, own, {"error"}),
        "completions": ({"prompt": "hi"}, own, {"error"}),
        "responses": ({"input": "hi"}, own, {*own, "sequence_number"}),
        "messages": ({"messages": HI, "max_tokens": 9}, anthropics, {"type", "error"}),
    }
    for path, (body, fields, event) in wanted.items():
        api.engine.failure = failure
        refused = await api.post(f"/v1/{path}", **body)
        assert set(refused.json()["error"]) == fields, path
        streamed = await api.post(f"/v1/{path}", **body, stream=True)
        (*_, last) = (line for line in streamed.text.splitlines() if line.startswith("data: {"))
        assert set(json.loads(last.removeprefix("data: "))) == event, path


async def test_an_error_in_mid_stream_names_the_clients_own_field(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, TEXT)
    api.engine.failure = InvalidRequest("max_tokens", 9, "less")
    response = await api.post("/v1/responses", input="hi", max_output_tokens=9, stream=True)
    assert json.loads(response.text.rstrip().rpartition("data: ")[2])["param"] == "max_output_tokens"
    api.engine.failure = InvalidRequest("stop", ["x"], "shorter")
    response = await api.post("/v1/messages", messages=HI, max_tokens=9, stream=True)
    error = json.loads(response.text.rstrip().rpartition("data: ")[2])["error"]
    assert error["message"].startswith("stop_sequences: ")


async def test_calls_belong_to_the_answer_in_front_of_them(tmp_path: Path) -> None:
    """What a client sends back shows the model one turn, as the model wrote it."""
    api = api_that_writes(tmp_path, "x")
    names = ("a", "b")
    calls = [{"type": "function_call", "call_id": name, "name": "swim", "arguments": "{}"} for name in names]
    results = [{"type": "function_call_output", "call_id": name, "output": f"done {name}"} for name in names]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Think."}]}
    items = [*HI, {"role": "assistant", "content": "Yes."}, *calls, *results, thought, calls[0], results[0]]
    assert (await api.post("/v1/responses", input=items, tools=[FUNCTION])).status_code == 200
    shown = prompt_of(api)
    assert shown.count("<|im_start|>assistant\n") == 3  # the last one is for the answer
    function = {"name": "swim", "arguments": "{}"}
    written = [{"id": name, "type": "function", "function": function} for name in names]
    outputs = [{"role": "tool", "tool_call_id": name, "content": f"done {name}"} for name in names]
    turns = [
        *HI,
        {"role": "assistant", "content": "Yes.", "tool_calls": written},
        *outputs,
        {"role": "assistant", "content": "", "tool_calls": written[:1], "reasoning_content": "Think."},
        outputs[0],
    ]
    tool = {"type": "function", "function": {"name": "swim", "parameters": PARAMETERS}}
    assert (await api.chat(messages=turns, tools=[tool])).status_code == 200
    assert prompt_of(api) == shown


def test_kept_conversations_are_bounded_and_belong_to_their_client() -> None:
    conversations = Conversations(most=2, most_chars=200)
    for name in ("a", "b", "c"):
        conversations.keep(name, "me", [{"role": "user", "content": name}])
    assert conversations.find("c", "me") == [{"role": "user", "content": "c"}]
    for name, client in (("a", "me"), ("c", "you")):
        with pytest.raises(InvalidRequest):
            conversations.find(name, client)
    conversations.keep("long", "me", [{"role": "user", "content": "x" * 500}])
    with pytest.raises(InvalidRequest):
        conversations.find("long", "me")


def test_a_client_that_keeps_many_conversations_drops_none_of_others() -> None:
    conversations = Conversations(most=4, most_chars=2000)
    hello = [{"role": "user", "content": "hello"}]
    conversations.keep("first", "you", hello)
    for number in range(20):
        conversations.keep(f"short-{number}", "me", hello)
        conversations.keep(f"long-{number}", "them", [{"role": "user", "content": "x" * 900}])
    conversations.keep("too long", "them", [{"role": "user", "content": "x" * 5000}])
    assert conversations.find("first", "you") == hello
    assert conversations.find("short-19", "me") == hello
    for name in ("short-0", "long-0", "too long"):
        with pytest.raises(InvalidRequest):
            conversations.find(name, "me" if name.startswith("short") else "them")
