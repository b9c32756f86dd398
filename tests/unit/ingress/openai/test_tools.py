"""Tools, reasoning and what the model's template renders, over HTTP and with the `openai` client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.generation.text.chat_messages import Message
from cluster.generation.text.chat_template import PLAIN, ChatTemplate, TemplateOptions, TextTooLong
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.fakes.fake_engine import MODEL
from tests.support.fakes.http_app import HI, api_that_writes, chunks, error_of, openai_client
from tests.support.models.tiny_tokenizer import byte_level

CALL = '<tool_call>\n{"name": "swim", "arguments": {"to": "the world"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "swim", "parameters": {"type": "object"}}}


async def test_the_openai_client_gets_calls_whole_and_streamed(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, f"Yes. {CALL}")
    body: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": [TOOL], "seed": 1}
    async with openai_client(api) as client:
        answer = await client.chat.completions.create(**body)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Yes.")
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("swim", {"to": "the world"})
        arguments, names, content, reasons = "", [], "", []
        async for chunk in await client.chat.completions.create(**body, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
            for part in delta.tool_calls or ():
                assert part.function is not None
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
        assert (names, arguments, content) == (["swim"], call.function.arguments, "Yes.")
        assert reasons[-1] == "tool_calls"


async def test_the_answer_of_a_tool_is_sent_back(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    async with openai_client(api) as client:
        first = await client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])  # type: ignore[arg-type, list-item]
        called = first.choices[0].message
        assert called.tool_calls
        turns: list[Any] = [*HI, called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "done"}]
        await client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])  # type: ignore[list-item]
    prompt = api.tokenizer.decode(api.engine.requests[-1].prompt, skip_special_tokens=False)
    assert '<tool_call>{"name": "swim", "arguments": {"to": "the world"}}</tool_call>' in prompt
    assert "<|im_start|>tool\ndone" in prompt
    assert json.dumps(TOOL) in prompt


async def test_calls_of_requests_whose_long_ids_begin_alike_have_ids_of_their_own(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    found = []
    for end in ("1", "2"):
        message = (await api.chat(tools=[TOOL], request_id="x" * 40 + end)).json()["choices"][0]["message"]
        found.append(message["tool_calls"][0]["id"])
    assert len({*found}) == 2
    assert all(len(one) <= 64 for one in found)


async def test_tools_are_not_offered_if_the_choice_is_none(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    body = (await api.chat(tools=[TOOL], tool_choice="none")).json()
    nothing = {"reasoning_content": None, "reasoning": None}
    assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL, **nothing}
    assert "swim" not in api.tokenizer.decode(api.engine.requests[0].prompt)


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice", "unless there are tools"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "fly"}}}, "tool_choice", "one of the tools"),
        ({"tool_choice": "auto"}, "tool_choice", "unless there are tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "a name"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "own variables"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "continue_final"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "never run"),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_refused_by_name_and_reason(
    tmp_path: Path, values: dict[str, Any], field: str, reason: str
) -> None:
    api = api_that_writes(tmp_path, "x")
    error = error_of(await api.chat(**values))
    assert error["param"] == field
    assert reason in error["message"]


async def test_the_last_message_is_continued(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, " world")
    turns = [*HI, {"role": "assistant", "content": "hello "}]
    assert (await api.chat(messages=turns, continue_final_message=True)).status_code == 200
    assert (await api.chat(add_generation_prompt=False)).status_code == 200
    prompts = [api.tokenizer.decode(one.prompt, skip_special_tokens=False) for one in api.engine.requests]
    assert prompts[0].endswith("<|im_start|>assistant\nhello ")
    assert prompts[1].endswith("hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("stop", "reason", "calls"),
    [
        ("the", "stop", 0),
        ('{"name', "stop", 0),
        ("}", "stop", 0),
        ("\n</tool_call>", "tool_calls", 1),
        ("zzz", "tool_calls", 1),
    ],
)
async def test_a_stop_string_inside_a_call_ends_the_answer_without_it(
    tmp_path: Path, stop: str, reason: str, calls: int
) -> None:
    api = api_that_writes(tmp_path, CALL)
    body: dict[str, Any] = {"tools": [TOOL], "stop": stop, "seed": 1}
    (choice,) = (await api.chat(**body)).json()["choices"]
    found = choice["message"].get("tool_calls", [])
    assert (choice["finish_reason"], len(found)) == (reason, calls)
    assert not choice["message"]["content"]
    for call in found:
        json.loads(call["function"]["arguments"])
    streamed = chunks(await api.chat(**body, stream=True))
    assert streamed[-1]["choices"][0]["finish_reason"] == reason
    deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
    assert sum("id" in call for delta in deltas for call in delta.get("tool_calls", ())) == calls
    assert not "".join(delta.get("content") or "" for delta in deltas)


async def test_an_answer_that_ends_within_a_call_does_not_end_for_it(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, '<tool_call>{"name": "swim", "arguments": {"to": "the')
    (choice,) = (await api.chat(tools=[TOOL])).json()["choices"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("most", range(1, 12))
async def test_a_forced_call_that_is_cut_before_its_name_is_no_content(tmp_path: Path, most: int) -> None:
    api = api_that_writes(tmp_path, CALL)
    body: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": most}
    (choice,) = (await api.chat(**body)).json()["choices"]
    assert not choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    deltas = [choice["delta"] for chunk in chunks(await api.chat(**body, stream=True)) for choice in chunk["choices"]]
    assert not "".join(delta.get("content") or "" for delta in deltas)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "swim"}}])
async def test_a_required_tool_wins_over_the_form_of_a_text(tmp_path: Path, choice: object) -> None:
    api = api_that_writes(tmp_path, CALL)
    response = await api.chat(tools=[TOOL], tool_choice=choice, response_format=SCHEMA_FORMAT)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "response_format"
    grammar = api.engine.requests[-1].sampling.grammar
    assert grammar is not None and "swim" in grammar.text
    tool = {"type": "function", "name": "swim", "parameters": {"type": "object"}}
    choice = choice if isinstance(choice, str) else {"type": "function", "name": "swim"}
    body = {"input": "hi", "tools": [tool], "tool_choice": choice, "text": {"format": {"type": "json_object"}}}
    response = await api.post("/v1/responses", **body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "text.format"


async def test_json_objects_may_have_a_schema(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, "x")
    for form in (SCHEMA_FORMAT, {"type": "json_object", "schema": SCHEMA}):
        assert (await api.chat(response_format=form)).status_code == 200
    first, second = (request.sampling.grammar for request in api.engine.requests)
    assert first == second
    error = error_of(await api.chat(response_format={"type": "json_object", "schema": 5}))
    assert error["param"] == "response_format.schema"


async def test_the_alternatives_that_a_client_names_include_the_token_itself(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, "hello")
    body = (
        await api.chat(logprobs=True, top_logprobs=1, logprob_token_ids=[5, 6], return_tokens_as_token_ids=True)
    ).json()
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]


async def test_a_stream_that_may_have_calls_is_not_resumed(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, CALL)
    values = {"messages": HI, "tools": [TOOL], "stream": True}
    response = await api.http.post("/v1/chat/completions", json=values)
    assert chunks(response)
    event_id = response.text.partition("\n")[0].removeprefix("id: ")
    again = await api.http.post("/v1/chat/completions", json=values, headers={"Last-Event-ID": event_id})
    assert error_of(again)["param"] == "Last-Event-ID"


THINKING = (
    "{% for message in messages %}{{ message.role }}:{{ message.reasoning_content or '' }}{{ message.content }}\n"
    "{% endfor %}{% if documents %}{{ documents[0].text }}\n{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)


async def test_reasoning_is_returned_apart_from_the_content(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path, chat_template=THINKING))
    assert tokenizer.reasoning_format is not None and tokenizer.reasoning_format.closing == "</think>"
    template = ChatTemplate(THINKING, {})
    documents = TemplateOptions(arguments='{"documents": [{"text": "a fish"}], "enable_thinking": false}')
    assert template.render([Message("user", "hi")], documents) == "user:hi\na fish\n<think></think>"
    assert template.render([Message("user", "hi")]) == "user:hi\n<think>\n"


def test_templates_are_bounded() -> None:
    long = ChatTemplate("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}", {})
    with pytest.raises(TextTooLong, match="1050"):
        long.render([Message("user", "x" * 50)], PLAIN, 1000)
