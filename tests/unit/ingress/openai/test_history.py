"""What earlier messages hold: calls as a model wrote them, texts in several forms, and a last message to continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from cluster.generation.text.chat_messages import CalledTool, Message
from cluster.generation.text.chat_template import ChatTemplate, TemplateOptions
from pilotfish.v1 import generation_pb2
from tests.support.fakes.both_apis import BothApis, apis
from tests.support.fakes.http_app import HI, api_that_writes, prompt_of
from tests.unit.ingress.openai.test_tools import TOOL

__all__ = ["apis"]

BROKEN = [
    '{"path": "',
    "free text",
    "null",
    "[]",
    "5",
    '"text"',
    '{"a": 1} {"b": 2}',
    "[" * 70,
    '{"a":' + "[" * 64 + "]" * 64 + "}",
]
CONTINUED = ['">"', "|", "<", "_", "e", "end", "\n", "", "<|im_end|>", "assistant", "hi", " two spaces  "]


def called(arguments: object, name: object = "swim") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", BROKEN)
async def test_a_call_whose_arguments_are_no_object_is_shown_as_it_is(tmp_path: Path, arguments: str) -> None:
    api = api_that_writes(tmp_path, "x")
    turns = [*HI, called(arguments), {"role": "tool", "content": "done"}]
    assert (await api.chat(messages=turns, tools=[TOOL])).status_code == 200
    assert f'"arguments": {arguments}}}</tool_call>' in prompt_of(api)
    assert (await api.post("/tokenize", messages=turns, tools=[TOOL])).status_code == 200


@pytest.mark.parametrize("arguments", BROKEN)
async def test_the_other_apis_take_such_a_call_too(tmp_path: Path, arguments: str) -> None:
    api = api_that_writes(tmp_path, "x")
    items = [{"type": "function_call", "call_id": "c", "name": "swim", "arguments": arguments}]
    tool = {"type": "function", "name": "swim"}
    assert (await api.post("/v1/responses", input=items, tools=[tool])).status_code == 200
    assert arguments in prompt_of(api)
    block = {"type": "tool_use", "id": "t", "name": "swim", "input": {"partial_json": arguments}}
    turns = [*HI, {"role": "assistant", "content": [block]}]
    body = {"messages": turns, "max_tokens": 4, "tools": [{"name": "swim"}]}
    assert (await api.post("/v1/messages", **body)).status_code == 200
    assert f'"arguments": {arguments}}}</tool_call>' in prompt_of(api)


@pytest.mark.parametrize("arguments", BROKEN)
async def test_the_grpc_api_takes_such_a_call_too(apis: BothApis, arguments: str) -> None:
    call = generation_pb2.ToolCall(name="n" * 300, arguments=arguments)
    message = generation_pb2.ChatMessage(role="assistant", tool_calls=[call] * 130)
    request = generation_pb2.GenerateRequest(chat=generation_pb2.ChatInput(messages=[message]))
    assert (await apis.over_grpc(request))[1] == ""


async def test_a_call_that_the_length_of_its_answer_cut_off_is_sent_back(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, '<tool_call>{"name": "swim", "arguments": {"to": "the')
    answer = (await api.chat(tools=[TOOL])).json()["choices"][0]["message"]
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"to": "the'
    assert (await api.chat(messages=[*HI, answer], tools=[TOOL])).status_code == 200
    assert '"arguments": {"to": "the}' in prompt_of(api)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}", r'"{\"a\": "'),
        ("{% for call in messages[0].tool_calls %}{{ call.function.arguments }}{% endfor %}", '{"a": '),
        (
            "{% for call in messages[0].tool_calls %}{% for name, value in call.function.arguments | items %}"
            "{{ name }}={{ value }}{% endfor %}{% endfor %}",
            'partial_json={"a": ',
        ),
    ],
)
def test_every_kind_of_template_shows_such_a_call(source: str, shown: str) -> None:
    message = Message("assistant", "", tool_calls=(CalledTool("", "f", '{"a": '),))
    assert ChatTemplate(source, {}).render([message]) == shown


def test_arguments_that_are_nested_too_deep_for_a_template_are_shown_as_they_are() -> None:
    deep = '{"a":' + "[" * 64 + "]" * 64 + "}"
    source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    message = Message("assistant", "", tool_calls=(CalledTool("", "f", deep),))
    assert ChatTemplate(source, {}).render([message]) == json.dumps(deep)


async def test_messages_of_other_servers_are_taken(tmp_path: Path) -> None:
    api = api_that_writes(tmp_path, "x")
    turns = [
        *HI,
        {"role": "assistant", "content": None, "refusal": "I refuse.", "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "swim", "arguments": '{"to": 1}'}},
    ]
    assert (await api.chat(messages=turns, tools=[TOOL])).status_code == 200
    assert "I refuse." in prompt_of(api)
    assert '"arguments": {"to": 1}}</tool_call>' in prompt_of(api)


@pytest.mark.parametrize(
    "part",
    ["hello", {"text": "hello"}, {"type": "input_text", "text": "hello"}, {"type": "output_text", "text": "hello"}],
)
async def test_a_text_part_may_be_a_plain_text_or_lack_its_type(tmp_path: Path, part: object) -> None:
    api = api_that_writes(tmp_path, "x")
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        values = {name: [{"role": "user", "content": [part]}]}
        assert (await api.post(path, **values)).status_code == 200
        assert "<|im_start|>user\nhello<|im_end|>" in prompt_of(api)


@pytest.mark.parametrize("content", CONTINUED)
async def test_the_prompt_ends_where_the_continued_message_ends(tmp_path: Path, content: str) -> None:
    """The place is that of the message, also if the template's own text has the same characters."""
    api = api_that_writes(tmp_path, "x")
    turns = [*HI, {"role": "assistant", "content": content}]
    assert (await api.chat(messages=turns, continue_final_message=True)).status_code == 200
    assert prompt_of(api) == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"
    tokens = (await api.post("/tokenize", messages=turns, continue_final_message=True)).json()["tokens"]
    assert tuple(tokens) == tuple(api.engine.requests[-1].prompt)


@pytest.mark.parametrize("content", CONTINUED)
async def test_the_continued_message_of_a_grpc_client_ends_there_too(apis: BothApis, content: str) -> None:
    message = generation_pb2.ChatMessage(role="assistant", content=content)
    chat = generation_pb2.ChatInput(messages=[message], continue_final_message=True)
    assert (await apis.over_grpc(generation_pb2.GenerateRequest(chat=chat)))[1] == ""
    tokens = await apis.client.tokenize(generation_pb2.TokenizeRequest(chat=chat))
    text = await apis.client.detokenize(
        generation_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=False)
    )
    assert text.text == f"<|im_start|>assistant\n{content}"


CONTINUE = TemplateOptions(continue_final_message=True, add_generation_prompt=False)


def test_white_space_that_a_template_strips_is_left_out_of_a_continued_message() -> None:
    stripping = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    assert stripping.render([Message("user", "a"), Message("assistant", " b \n")], CONTINUE) == "[a][b"
    plain = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    assert plain.render([Message("assistant", " b \n")], CONTINUE) == "[ b \n"


def test_a_continued_message_may_have_the_characters_that_mark_places() -> None:
    template = ChatTemplate("{% for m in messages %}\ue000{{ m.content }}\ue000{% endfor %}", {})
    texts = ("\ue001", json.loads('"\\ue002"'))
    for text in texts:
        assert template.render([Message("user", "\ue003"), Message("assistant", text)], CONTINUE).endswith(
            "\ue000" + text
        )


def test_a_template_that_does_not_show_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages | length }}", {})
    with pytest.raises(InvalidRequest) as caught:
        template.render([Message("assistant", "1")], CONTINUE)
    assert caught.value.field == "continue_final_message"
