"""A checkpoint's own description of its answers, as `transformers` reads it: whole, streamed, and as a grammar."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from cluster.core.answer_format import OWN_FORMAT, AnswerFormat
from cluster.core.errors import NotReady
from cluster.generation.grammar.tool_calls import ANY_TOOL, tool_call_grammar
from cluster.generation.text.response_template import Inexpressible, own_formats
from cluster.generation.text.tokenizer import BY_TEMPLATE, Parsers, Tokenizer
from cluster.ingress.openai.formats import ChatFormat, Choice
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.call_reader import CallOptions
from pilotfish.v1 import generation_pb2
from tests.support.grammars import accepts
from tests.support.models.tiny_tokenizer import byte_level
from tests.unit.ingress.openai.test_answer_formats import MarkingModel
from tests.unit.ingress.openai.test_call_parser import parsed, read, ways_to_split

TO = {"to": {"type": "string"}, "depth": {"type": "integer"}, "deep": {"type": "boolean"}}
SCHEMAS: dict[str, Any] = {"swim": {"type": "object", "properties": TO}, "rest": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
ARGUMENTS = {"to": 'reef "A" <b>', "depth": 3}
SWIM = ("swim", ARGUMENTS)
BODY = json.dumps(ARGUMENTS)
FUNCTION = {"type": "function", "function": "{content}"}
CAPTURED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(calls: dict[str, Any], *, anchor: str = "<|bot|>", **fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": {**fields, "tool_calls": calls}}


def thinking(opening: str = "<think>", closing: str = "</think>") -> dict[str, Any]:
    return {"open": opening, "close": closing, "content": "text"}


REST = {"close": "<|end|>"}
"""Content without an opening: what is in no other field."""
JSON_CALLS = {
    "open_pattern": r"\s*<call>",
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": FUNCTION,
}
TAGGED = {
    "open_pattern": r"\s*<call>\s*<fn=(?P<name>[^>\n]+)>",
    "close_pattern": r"</fn>\s*</call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<arg=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</arg>"},
    "transform": CAPTURED,
}
BRACES = {
    "open_pattern": r"<\|call>call:(?P<name>\w+)",
    "close": "<call|>",
    "repeats": True,
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
    "transform": CAPTURED,
}
KEYED = {
    "open_pattern": r"<call>(?P<name>.*?)\n",
    "close": "</call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<key>(?P<key>.*?)</key>\s*<value>(?P<value>.*?)</value>",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    "transform": CAPTURED,
}
ACTIONS = {
    "open": "<|ACTION|>",
    "close": "<|/ACTION|>",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
}
CHANNEL = {
    "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
    "close": "<|call|>",
    "repeats": True,
    "content": "json",
    "transform": CAPTURED,
}
NESTED = {
    **JSON_CALLS,
    "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.input}"}},
}
FINAL = {"open": "<|channel|>final<|message|>", "close": "<|end|>"}
SAMPLES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "json": (
        template(JSON_CALLS, reasoning_content=thinking(), content=REST),
        "",
        (
            "<think>\nA reef.\n</think>\n\nOn my way.<|end|>",
            f'<think>A reef.</think>On my way.\n<call>\n{{"name": "swim", "arguments": {BODY}}}\n</call>'
            '\n<call>\n{"name": "rest", "arguments": {}}\n</call>',
            f'<call>{{"arguments": {BODY}, "name": "swim"}}</call>',
            "plain < text",
        ),
    ),
    "tags": (
        template(TAGGED, reasoning_content=thinking(), content=REST),
        "<|bot|><think>\n",
        (
            'A reef.\n</think>\n\nOn my way.\n\n<call>\n<fn=swim>\n<arg=to>\nreef "A" <b>\n</arg>\n'
            "<arg=depth>\n3\n</arg>\n</fn>\n</call>\n<call>\n<fn=rest>\n</fn>\n</call>",
            "</think><call><fn=swim><arg=deep> true </arg><arg=to>  a b  </arg></fn></call>",
        ),
    ),
    "braces": (
        template(BRACES, thinking=thinking("<|chan>thought\n", "<chan|>"), content={"close": ["<turn|>", "<eos>"]}),
        "",
        (
            "<|chan>thought\nA reef.<chan|>On my way.<turn|>",
            '<|chan>thought\nA reef.<chan|><|call>call:swim{to:<q>reef "A" <b><q>,depth:3}<call|>'
            "<|call>call:rest{}<call|>",
        ),
    ),
    "keys": (
        template(KEYED, reasoning=thinking(), content=REST),
        "",
        (
            "<think>A reef.</think>\nOn my way."
            '<call>swim\n<key>to</key>\n<value>reef "A" <b></value>\n<key>depth</key>\n<value>3</value>\n</call>',
            "<call>swim\n<key>deep</key><value>true</value></call><call>rest\n</call>",
        ),
    ),
    "actions": (
        template(ACTIONS, thinking=thinking("<|T|>", "<|/T|>"), content={"open": "<|R|>", "close": "<|/R|>"}),
        "",
        (
            f'<|T|>A reef.<|/T|><|ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "swim", "parameters": {BODY}}},\n'
            '    {"tool_call_id": "1", "tool_name": "rest", "parameters": {}}\n]<|/ACTION|>',
            "<|T|>A reef.<|/T|><|R|>On my way.<|/R|>",
        ),
    ),
    "channels": (
        template(
            CHANNEL,
            anchor="<|start|>bot",
            thinking=thinking("<|channel|>analysis<|message|>", "<|end|>"),
            content=FINAL,
        ),
        "",
        (
            "<|channel|>analysis<|message|>A reef.<|end|><|start|>bot<|channel|>final<|message|>On my way.<|end|>",
            "<|channel|>analysis<|message|>A reef.<|end|><|start|>bot<|channel|>commentary to=functions.swim "
            f"<|constrain|>json<|message|>{BODY}<|call|>",
        ),
    ),
    "nested": (
        template(NESTED, content=REST),
        "",
        (f'On my way.<call>{{"tool": "swim", "input": {BODY}}}</call><call>{{"tool": "rest", "input": {{}}}}</call>',),
    ),
    "begun": (
        template(
            JSON_CALLS,
            thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            content={"open": "<answer>\n", "close_pattern": r"\n?</answer>"},
        ),
        "",
        (
            "A reef.\n</think>\n\n<answer>\nOn my way.\n</answer>\n",
            f'A reef.\n</think>\n<call>\n{{"name": "swim", "arguments": {BODY}}}\n</call>',
        ),
    ),
}
ALL = [pytest.param(name, text, id=f"{name}-{place}") for name, (_, _, texts) in SAMPLES.items() for place, text in enumerate(texts)]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(("name", "text"), ALL)
def test_an_answer_is_read_as_transformers_reads_it_however_it_is_split(name: str, text: str) -> None:
    source, prefix, _ = SAMPLES[name]
    message = parse_response(text, source, prefix=prefix, tools=TOOLS)
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    thought = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if key in message), "")
    assert thought or called or message["content"]
    own = own_formats(source)
    begins = bool(prefix) or (own.reasoning is not None and own.reasoning.begins_inside)
    for parts in ways_to_split(text):
        parser = AnswerParser("c", AnswerFormat(own.calls, own.reasoning, begins), CallOptions(SCHEMAS))
        content, reasoning, calls = read(parser, parts)
        assert (content.strip(), reasoning.strip()) == (message.get("content", "").strip(), thought), parts
        assert parsed(calls) == called


NATIVE = {
    "json": f'<call>\n{{"name": "swim", "arguments": {BODY}}}\n</call>\n<call>\n{{"name": "rest", "arguments": {{}}}}\n</call>',  # noqa: E501
    "tags": '<call>\n<fn=swim>\n<arg=to>\nreef "A" <b>\n</arg>\n<arg=depth>\n3\n</arg>\n</fn>\n</call>\n'
    "<call>\n<fn=rest>\n</fn>\n</call>",
    "braces": '<|call>call:swim{to:<q>reef "A" <b><q>,depth:3}<call|><|call>call:rest{}<call|>',
    "keys": '<call>swim\n<key>to</key><value>reef "A" <b></value>\n<key>depth</key><value>3</value>\n</call>'
    "<call>rest\n</call>",
    "actions": f'<|ACTION|>[\n    {{"tool_name": "swim", "parameters": {BODY}}},\n    {{"tool_name": "rest", "parameters": {{}}}}\n]<|/ACTION|>',  # noqa: E501
    "channels": f"<|channel|>commentary to=functions.swim<|message|>{BODY}<|call|>"
    "<|channel|>commentary to=functions.rest<|message|>{}<|call|>",
    "nested": f'<call>{{"tool": "swim", "input": {BODY}}}</call><call>{{"tool": "rest", "input": {{}}}}</call>',
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_required_call_is_demanded_in_the_form_that_the_template_reads(name: str) -> None:
    calls, text = own_formats(SAMPLES[name][0]).calls, NATIVE[name]
    assert calls is not None
    tools = [json.dumps(tool) for tool in TOOLS]
    free = tool_call_grammar(tools, ANY_TOOL, calls, {}, single=False)
    assert accepts(free, text)
    for wrong in (text.replace("swim", "sink"), text.replace("3", "deep"), "Yes.", f"{text}."):
        assert not accepts(free, wrong)
    assert not accepts(tool_call_grammar(tools, ANY_TOOL, calls, {}, single=True), text)
    message = parse_response(text, SAMPLES[name][0], prefix="", tools=TOOLS)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "swim", "arguments": ARGUMENTS},
        {"name": "rest", "arguments": {}},
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "of version 1"),
    ({"fields": {}}, "between 1 and 8 fields"),
    ({"flavour": 1}, "unknown keys flavour"),
    ({"fields": {"plan": {}}}, "field 'plan'"),
    ({"fields": {"thinking": {"open": "<a>", "close": ["</a>", "</b>"]}}}, "one text before and one after"),
    ({"fields": {"thinking": {**thinking(), "transform": {"a": 1}}}}, "unknown keys transform"),
    ({"fields": {"thinking": thinking(), "reasoning": thinking()}}, "needed one of them"),
    ({"fields": {"content": {"close_pattern": "a+b"}}}, "is more than texts"),
    ({"fields": {"content": {"close": "x" * 257}}}, "at most 256 bytes"),
    ({"fields": {"content": {"close": [f"<{place}>" for place in range(33)]}}}, "between 0 and 32 markers"),
    ({"fields": {"content": {"close_pattern": "(" * 5000}}}, "at most 1024 characters"),
    (
        {"fields": {"tool_calls": {**JSON_CALLS, "open_pattern": r"(?:<a>)?[^<]*<call>"}}},
        r"without \* at its",
    ),
    (
        {"fields": {"tool_calls": {**JSON_CALLS, "open_pattern": r"(?P<name>\w+)<call>", "transform": CAPTURED}}},
        "first",
    ),
    ({"fields": {"tool_calls": {**JSON_CALLS, "content": "kv-lines"}}}, "json or xml-inline"),
    ({"fields": {"tool_calls": {**JSON_CALLS, "transform": {"type": "function"}}}}, "makes no function"),
    (
        {"fields": {"tool_calls": {**TAGGED, "content_args": {"tag_pattern": "<(?P<key>.+)>"}}}},
        "a key and then a value",
    ),
    ({"fields": {"tool_calls": {**TAGGED, "content_args": {"merge_duplicates": True}}}}, "merge_duplicates"),
    ({"fields": {"tool_calls": {**BRACES, "content_args": {"string_delims": [["<", ">"]]}}}}, "two equal delimiters"),
    ({"fields": {"tool_calls": {**JSON_CALLS, "close": "*"}}}, r"without \*"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_no_row_describes_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    whole = {**copy.deepcopy(SAMPLES["json"][0]), **change}
    with pytest.raises(Inexpressible, match=reason):
        own_formats(whole)


def load(directory: Path, own: object, parsers: Parsers = BY_TEMPLATE) -> Tokenizer:
    return Tokenizer.load(byte_level(directory, response_template=own), parsers)


def test_a_description_counts_before_the_chat_template_and_after_the_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = SAMPLES["json"][0]
    loaded = load(tmp_path, own)
    assert (loaded.call_format, loaded.reasoning_format) == (own_formats(own).calls, own_formats(own).reasoning)
    assert load(tmp_path, own, Parsers("mistral_v3")).call_format.name == "mistral_v3"
    assert load(tmp_path, own, Parsers(reasoning_parser="none")).reasoning_format is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, {"fields": {"plan": {}}}).call_format.name == "hermes"
    assert "field 'plan'" in caplog.text and "its chat template is" in caplog.text


async def test_its_calls_reach_clients_of_the_http_api(tmp_path: Path) -> None:
    text = '<think>hm</think>ok\n<call>\n{"name": "swim", "arguments": {"to": "x"}}\n</call>'
    model = MarkingModel(tmp_path, text)
    own = own_formats(SAMPLES["json"][0])
    assert own.calls is not None
    model.tokenizer.call_format, model.tokenizer.reasoning_format = own.calls, own.reasoning
    choice = await model.chat(tools=[TOOLS[0]], max_tokens=256)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "ok")
    assert message["tool_calls"][0]["function"] == {"name": "swim", "arguments": '{"to": "x"}'}
    assert choice["finish_reason"] == "tool_calls"


def test_a_coordinator_that_describes_its_answers_wrongly_is_not_ready() -> None:
    started = generation_pb2.GenerationStarted(tool_format=OWN_FORMAT, own_call_format=generation_pb2.CallFormat())
    with pytest.raises(NotReady, match=r"own_call_format\.parts"):
        ChatFormat().begin(Choice(0), started)
