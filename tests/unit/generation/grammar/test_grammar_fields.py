"""The parameters that constrain answers, over HTTP: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.core.grammar import Grammar, GrammarKind, source_of
from tests.support.fakes.http_app import HttpApi, error_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))

CONTEXT = 1024


def json_schema(schema: object = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"response_format": json_schema()}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.of_choices(["a", "b"])),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.GRAMMAR, 'start: "a"')),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.of_choices(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.GRAMMAR, 'start: "a"')),
    ],
)
async def test_every_parameter_that_constrains_an_answer_reaches_the_engine(
    api: HttpApi, values: dict[str, Any], expected: Grammar | None
) -> None:
    for response in (await api.chat(**values), await api.complete(**values)):
        assert response.status_code == 200, response.text
    for request in api.engine.requests:
        found = request.sampling.grammar
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.kind is expected.kind
            assert source_of(found) == source_of(expected)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(5)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"type": "fish"})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_grammar": "start: other"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex"),
    ],
)
async def test_what_cannot_be_a_grammar_is_refused_by_name(api: HttpApi, values: dict[str, Any], field: str) -> None:
    for response in (await api.chat(**values), await api.complete(**values)):
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == field
    assert api.engine.requests == []


async def test_the_form_of_a_response_is_its_schema(api: HttpApi) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    response = await api.post("/v1/responses", input="hi", text={"format": form})
    assert response.status_code == 200, response.text
    assert api.engine.requests[0].sampling.grammar == OF_SCHEMA
    wrong = await api.post("/v1/responses", input="hi", text={"format": {**form, "schema": {"type": "fish"}}})
    assert error_of(wrong)["param"] == "text.format.schema"
    for body, field in (
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "fish"}}]}, "tools[0].parameters"),
        ({"text": {"format": {"type": "fish"}}}, "text.format.type"),
        ({"input": "x" * 1500}, "input"),
    ):
        choice = {"tool_choice": "required"} if "tools" in body else {}
        assert error_of(await api.post("/v1/responses", **{"input": "hi", **body, **choice}))["param"] == field
    tool = {"name": "f", "input_schema": {"type": "fish"}}
    message = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tool_choice": {"type": "any"}}
    refused = await api.post("/v1/messages", tools=[tool], **message)
    assert refused.json()["error"]["message"].startswith("tools[0].input_schema: ")


class Account(pydantic.BaseModel):
    """A model of pydantic whose schema has formats of its own."""

    password: pydantic.SecretStr
    picture: pydantic.SecretBytes
    folder: Path
    created: datetime
    size: pydantic.Json[int]


OPENAPI = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "format": "date"},
        "uniqueItems": {"type": "array", "items": {"type": "integer", "format": "int32"}, "uniqueItems": False},
        "other": {"$ref": "#/components/schemas/other"},
        "names": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": None}},
    },
    "required": ["format", "uniqueItems", "other"],
    "components": {"schemas": {"other": {"enum": [{"format": "fish"}], "format": "fish"}}},
}


@pytest.mark.parametrize("schema", [Account.model_json_schema(), OPENAPI])
async def test_keywords_that_say_nothing_of_the_form_are_annotations(api: HttpApi, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert (await api.chat(response_format=form)).status_code == 200
    assert (await api.complete(guided_json=schema)).status_code == 200
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert (await api.chat(tools=[tool], tool_choice="required")).status_code == 200
    assert [request.sampling.grammar is not None for request in api.engine.requests] == [True] * 3


async def test_known_formats_hold_and_names_that_look_like_keywords_stay(api: HttpApi) -> None:
    await api.complete(guided_json=OPENAPI)
    grammar = api.engine.requests[0].sampling.grammar
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), source_of(grammar))
    answer = '{"format": "2026-01-31", "uniqueItems": [1, 1], "other": {"format": "fish"}}'
    assert matcher.try_consume_tokens(list(answer.encode())) == len(answer)
    assert LLMatcher(LLTokenizer("byte"), source_of(grammar)).try_consume_tokens(list(b'{"format": "x')) < 13


async def test_strict_refuses_a_format_that_answers_might_miss(api: HttpApi) -> None:
    for schema, status in ((Account.model_json_schema(), 200), ({"format": "iri"}, 400)):
        response = await api.chat(response_format=json_schema(schema))
        assert response.status_code == status, response.text
        if status == 400:
            assert error_of(response)["param"] == "response_format.json_schema.schema"
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"format": "iri"}}}}
    refused = await api.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert error_of(refused)["param"] == "tools[0].function.parameters"
