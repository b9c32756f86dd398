"""Parsing OpenAI's requests: types and names."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters

HI = [{"role": "user", "content": "hi"}]


def chat(**values: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HI, **values}).encode())


def completion(**values: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **values}).encode())


def test_explicit_nulls_are_unset() -> None:
    nulls = dict.fromkeys([*ChatRequest.model_fields, *ChatRequest.unsupported])
    assert chat(**{**nulls, "messages": HI}) == chat()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_a_prompt_may_come_in_four_forms(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [[], 5, ["a", 1], [[1], "a"], [[1.5]], [True], {"text": "a"}])
def test_any_other_form_of_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field == "prompt"


def test_text_parts_stay_apart_for_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == ["one", "two"]


def test_other_parts_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/fish.png"}}
    with pytest.raises(UnsupportedParameter, match="'image_url' is refused") as caught:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, image]}])
    assert caught.value.field == "messages[0].content[1].type"


def test_a_returned_assistant_message_can_be_sent_back() -> None:
    message = {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[message]).messages[0].content == "hello"


BOTH: list[tuple[Callable[..., Any], type[Parameters]]] = [(chat, ChatRequest), (completion, CompletionRequest)]


@pytest.mark.parametrize(("parsed", "name"), [(parsed, name) for parsed, schema in BOTH for name in schema.unsupported])
def test_every_unsupported_parameter_is_refused_by_name(parsed: Callable[..., Any], name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parsed(**{name: {"any": "thing"}})
    assert caught.value.field == name


@pytest.mark.parametrize(("parsed", "schema"), BOTH)
def test_a_value_without_effect_is_accepted(parsed: Callable[..., Any], schema: type[Parameters]) -> None:
    harmless = {name: one.neutral[0] for name, one in schema.unsupported.items() if one.neutral}
    assert len(harmless) > 5
    parsed(**harmless)


def test_a_boolean_is_not_a_number() -> None:
    with pytest.raises(InvalidRequest, match="priority: False is refused"):
        chat(priority=False)
    with pytest.raises(InvalidRequest, match="n: True is refused"):
        chat(n=True)


def test_the_error_for_an_unknown_parameter_names_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequest, match="the nearest is temperature") as caught:
        chat(temprature=1)
    assert caught.value.field == "temprature"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"hue": 1}}, "stream_options.hue"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "content": "a", "name": {}, "tool_calls": [{}]}]}, "messages[0].name"),
        ({"messages": [{"content": "a", "tool_calls": [{}]}]}, "messages[0].role"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools", "function": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"user": "\ud800"}, "user"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ],
)
def test_a_wrong_type_is_refused_by_path(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"a": "\xc3"}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatRequest, body)
    assert caught.value.field == "body"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**32): 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"best_of": -1}, "best_of"),
        ({"best_of": 2**40}, "best_of"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
        ({"n": -1}, "n"),
    ],
)
def test_a_number_that_protobuf_cannot_hold_is_refused(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest, match="is refused; it must be") as caught:
        chat(**values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"), [([-1], "prompt[0]"), ([3, 2**32], "prompt[1]"), ([[1], [5, 2**32]], "prompt[1][1]")]
)
def test_a_prompt_of_tokens_that_protobuf_cannot_hold_is_refused(prompt: object, field: str) -> None:
    with pytest.raises(InvalidRequest, match="it must be a token id of the model's vocabulary") as caught:
        completion(prompt=prompt)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("schema", "body", "field"),
    [
        (ChatRequest, {"messages": [{}] * 50_000}, "messages[0].role"),
        (CompletionRequest, {"prompt": "a", "stop": [0] * 50_000}, "stop[0]"),
        (CompletionRequest, {"prompt": [0.5] * 50_000}, "prompt"),
    ],
)
def test_a_list_of_wrong_entries_is_read_up_to_the_first(schema: type, body: dict[str, object], field: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as refused:
            parse(schema, json.dumps(body).encode())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.field == field
    assert peak < 40 * 2**20


def test_stream_options_of_an_answer_that_is_not_streamed_are_refused() -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    with pytest.raises(InvalidRequest, match=r"stream_options.*left out unless stream is true"):
        parse(CompletionRequest, json.dumps(body).encode())
