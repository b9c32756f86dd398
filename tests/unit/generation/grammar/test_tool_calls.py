"""A required call of a tool is a grammar: in the form of the model's family, with arguments that match the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.core.answer_format import ToolFormat
from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind
from cluster.generation.grammar.tool_calls import ANY_TOOL, tool_call_grammar, with_special_opening
from cluster.ingress.openai.parsing.call_parser import CallParser
from cluster.ingress.openai.parsing.parts import PartKind
from tests.support.fakes.http_app import HI, HttpApi, error_of

PLACE = {"type": "object", "properties": {"to": {"$ref": "#/$defs/name"}}, "required": ["to"], "$defs": {"name": {"enum": ["reef", "coast"]}}}  # fmt: skip  # noqa: E501
SWIM = {"type": "function", "function": {"name": "swim", "parameters": PLACE}}
REST = {"type": "function", "function": {"name": "rest"}}
TOOLS = [json.dumps(SWIM), json.dumps(REST)]


ITSELF = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "required": ["a"]}


def wrong_tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": "a", "parameters": parameters}}


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def parsed(form: ToolFormat, text: str) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in a text."""
    parser = CallParser(form)
    calls: list[list[str]] = []
    for part in [*parser.push(text), *parser.flush()]:
        if part.kind is PartKind.CALL:
            calls.append([part.text, ""])
        else:
            assert part.kind is PartKind.ARGUMENTS, part
            calls[-1][1] += part.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def texts(form: ToolFormat) -> tuple[str, str, str]:
    """A call of `swim`, a call of `rest`, and both."""
    if form is ToolFormat.LLAMA:
        swim, rest = '{"name": "swim", "parameters": {"to": "reef"}}', '{"name": "rest", "parameters": {}}'
        return swim, rest, ""
    swim, rest = '{"name": "swim", "arguments": {"to": "reef"}}', '{"name": "rest", "arguments": {}}'
    if form is ToolFormat.MISTRAL:
        return f"[TOOL_CALLS][{swim}]", f"[TOOL_CALLS][{rest}]", f"[TOOL_CALLS][{swim}, {rest}]"
    swim, rest = (f"<tool_call>\n{call}\n</tool_call>" for call in (swim, rest))
    return swim, rest, f"{swim}\n{rest}"


@pytest.mark.parametrize("form", list(ToolFormat))
def test_the_grammar_accepts_what_the_parser_finds(form: ToolFormat) -> None:
    swim, rest, both = texts(form)
    free = tool_call_grammar(TOOLS, ANY_TOOL, form, single=False)
    assert accepts(free, swim) and accepts(free, rest)
    assert parsed(form, swim) == [("swim", {"to": "reef"})]
    jsonschema.validate(parsed(form, swim)[0][1], PLACE)
    assert parsed(form, rest) == [("rest", {})]
    single = tool_call_grammar(TOOLS, ANY_TOOL, form, single=True)
    assert accepts(single, swim) and accepts(single, rest)
    if both:
        assert accepts(free, both) and not accepts(single, both)
        assert [name for name, _ in parsed(form, both)] == ["swim", "rest"]
    named = tool_call_grammar(TOOLS, "swim", form, single=False)
    assert accepts(named, swim) and not accepts(named, rest)
    for wrong in (swim.replace("reef", "moon"), swim.replace("swim", "fly"), "Yes.", f"{swim} "):
        assert not accepts(free, wrong)


def test_a_name_may_have_any_characters() -> None:
    name = "".join(map(chr, range(1, 0x100))) + '"\\\u2028'
    tool = json.dumps({"function": {"name": name}})
    for form in ToolFormat:
        grammar = tool_call_grammar([tool], ANY_TOOL, form, single=True)
        field = "parameters" if form is ToolFormat.LLAMA else "arguments"
        call = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{field}": {{}}}}'
        call = {
            ToolFormat.HERMES: f"<tool_call>\n{call}\n</tool_call>",
            ToolFormat.MISTRAL: f"[TOOL_CALLS][{call}]",
        }.get(form, call)
        assert accepts(grammar, call), form
        assert parsed(form, call) == [(name, {})]


def test_the_opening_may_be_a_special_token() -> None:
    grammar = tool_call_grammar(TOOLS, ANY_TOOL, ToolFormat.MISTRAL, single=True)
    assert with_special_opening(grammar, 5).text.startswith('start: <[5]> "[" call "]"')


@pytest.mark.parametrize(
    ("tools", "required", "field"),
    [
        ([], ANY_TOOL, "tool_choice"),
        (TOOLS, "fly", "tool_choice"),
        (['{"function": {}}'], ANY_TOOL, "tools[0].function.name"),
        (['{"function": {"name": "a", "parameters": [1]}}'], ANY_TOOL, "tools[0].function.parameters"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: list[str], required: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_call_grammar(tools, required, ToolFormat.HERMES, single=False)
    assert caught.value.field == field


async def test_a_choice_of_tools_reaches_the_engine_as_a_grammar(tmp_path: Path) -> None:
    api = HttpApi(tmp_path)
    api.engine.context = 4096
    async with api.http:
        for choice in ("required", {"type": "function", "function": {"name": "rest"}}, "auto"):
            response = await api.chat(tools=[SWIM, REST], tool_choice=choice)
            assert response.status_code == 200, response.text
        grammars = [request.sampling.grammar for request in api.engine.requests]
        assert [None if grammar is None else grammar.kind for grammar in grammars] == [
            GrammarKind.GRAMMAR,
            GrammarKind.GRAMMAR,
            None,
        ]
        assert grammars[1] is not None and "swim" not in grammars[1].text
        values: list[tuple[dict[str, Any], str]] = [
            ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
            ({"use_beam_search": True, "n": 2}, "tool_choice"),
            ({"ignore_eos": True}, "ignore_eos"),
            ({"tools": [SWIM, wrong_tool({"type": "fish"})]}, "tools[1].function.parameters"),
            ({"tools": [SWIM, wrong_tool(ITSELF)]}, "tools[1].function.parameters"),
        ]
        for wrong, field in values:
            body = {"messages": HI, "tools": [SWIM], "tool_choice": "required", **wrong}
            assert error_of(await api.chat(**body))["param"] == field
