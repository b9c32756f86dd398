"""A required call of a tool is a grammar: in the form of the model's family, with arguments that match the schema."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.core.answer_format import AnswerFormat, CallFormat, ReasoningFormat
from cluster.core.answer_format_rows import CALL_FORMATS, REASONING_FORMATS
from cluster.core.bounds import MAX_GRAMMAR_BYTES
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind
from cluster.generation.grammar import constraints
from cluster.generation.grammar.constraints import after_reasoning
from cluster.generation.grammar.endless import endless_rule, endless_schema
from cluster.generation.grammar.tool_calls import ANY_TOOL, tool_call_grammar
from cluster.generation.text.tokenizer import Parsers
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.call_reader import CallOptions
from tests.support.fakes.http_app import HI, HttpApi, error_of
from tests.support.grammars import accepts
from tests.unit.ingress.openai.test_answer_formats import MarkingModel
from tests.unit.ingress.openai.test_call_parser import NATIVE, calls_of
from tests.unit.ingress.openai.test_call_parser import TOOLS as SCHEMAS

PLACE = {"type": "object", "properties": {"to": {"$ref": "#/$defs/name"}}, "required": ["to"], "$defs": {"name": {"enum": ["reef", "coast"]}}}  # fmt: skip  # noqa: E501
SWIM = {"type": "function", "function": {"name": "swim", "parameters": PLACE}}
REST = {"type": "function", "function": {"name": "rest"}}
TOOLS = [json.dumps(SWIM), json.dumps(REST)]


ITSELF = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "required": ["a"]}


def wrong_tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": "a", "parameters": parameters}}


def grammar_of(name: str, parameters: dict[str, Any], tool: str = "swim") -> Grammar:
    """The grammar of one call of a tool, in the format of that name."""
    described = json.dumps({"function": {"name": tool, "parameters": parameters}})
    return tool_call_grammar([described], tool, calls_of(name), {}, single=True)


def parsed(form: CallFormat, text: str) -> list[tuple[str, Any]]:
    """Names and arguments of the calls that a client finds in a text."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in map(json.loads, TOOLS)}
    message = AnswerParser("c", AnswerFormat(form), CallOptions(tools)).message(text)
    assert not message["content"]
    called = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in called]


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_the_grammar_accepts_what_models_of_each_format_write(form: CallFormat) -> None:
    tools = [json.dumps({"function": {"name": name, "parameters": schema}}) for name, schema in SCHEMAS.items()]
    native = NATIVE[form.name].split("<|call|>")[0]  # harmony's calls end with the end of sequence
    free = tool_call_grammar(tools, ANY_TOOL, form, {}, single=False)
    assert accepts(free, native)
    for wrong in (native.replace("swim", "sink"), native.replace("3", "deep"), "Yes.", f"{native} "):
        assert not accepts(free, wrong)
    if form.between is not None:
        assert not accepts(tool_call_grammar(tools, ANY_TOOL, form, {}, single=True), native)
        assert not accepts(tool_call_grammar(tools, "rest", form, {}, single=False), native)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral_v3", "qwen3_coder", "gemma4", "pythonic"])
def test_the_parser_finds_what_the_grammar_demands(name: str) -> None:
    form = calls_of(name)
    grammar = tool_call_grammar(TOOLS, "swim", form, {}, single=False)
    text = {
        "hermes": '<tool_call>\n{"name": "swim", "arguments": {"to": "reef"}}\n</tool_call>',
        "llama3_json": '{"name": "swim", "parameters": {"to": "reef"}}',
        "mistral_v3": '[TOOL_CALLS][{"name": "swim", "arguments": {"to": "reef"}}]',
        "qwen3_coder": "<tool_call>\n<function=swim>\n<parameter=to>\nreef\n</parameter>\n</function>\n</tool_call>",
        "gemma4": '<|tool_call>call:swim{to:<|"|>reef<|"|>}<tool_call|>',
        "pythonic": '[swim(to="reef")]',
    }[name]
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("reef", "moon"))
    assert parsed(form, text) == [("swim", {"to": "reef"})]


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "pythonic"])
def test_arguments_in_other_notations_match_their_schema(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "at": {"type": "integer"},
            "fast": {"type": "boolean"},
            "fish": {"type": "array", "items": {"$ref": "#/$defs/fish"}},
        },
        "required": ["at"],
        "$defs": {"fish": {"type": "object", "properties": {"is": {"type": "string"}}, "required": ["is"]}},
    }
    grammar = grammar_of(name, schema, "f")
    ends = {
        "qwen3_coder": ("<tool_call>\n<function=f>", "\n</function>\n</tool_call>"),
        "gemma4": ("<|tool_call>call:f{", "}<tool_call|>"),
        "pythonic": ("[f(", ")]"),
    }[name]
    inner = {
        "qwen3_coder": [
            "\n<parameter=at>\n1\n</parameter>",
            "\n<parameter=fast>\ntrue\n</parameter>",
            '\n<parameter=fish>\n[{"is": "x"}]\n</parameter>',
        ],
        "gemma4": ["at:1", ",fast:true", ',fish:[{is:<|"|>x<|"|>}]'],
        "pythonic": ["at=1", ", fast=True", ', fish=[{"is": "x"}]'],
    }[name]
    for taken in ([0], [0, 1], [0, 2], [0, 1, 2]):
        assert accepts(grammar, ends[0] + "".join(inner[place] for place in taken) + ends[1]), taken
    for taken in ([], [1], [0, 0]):
        assert not accepts(grammar, ends[0] + "".join(inner[place] for place in taken).lstrip(", ") + ends[1]), taken
    assert not accepts(grammar, ends[0] + "".join(inner).replace("is", "was") + ends[1])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "gemma4", "pythonic"])
def test_an_argument_has_one_of_the_values_that_its_schema_names(name: str) -> None:
    form = calls_of(name)
    values = [
        ({"enum": ["", "reef"]}, ["", "reef"], ["moon"]),
        ({"enum": ["reef", 3, None]}, ["reef", 3, None], ["moon", 4]),
        ({"type": "boolean", "enum": [True]}, [True], [False]),
        ({"const": None}, [None], [False, "moon"]),
        ({"type": "integer", "enum": [1, 2]}, [1, 2], [3]),
    ]
    for schema, allowed, others in values:
        parameters = {"type": "object", "properties": {"to": schema}, "required": ["to"]}
        grammar = grammar_of(name, parameters)
        calls = CallOptions({"swim": parameters})
        for value in [*allowed, *others]:
            text = written_call(name, value)
            assert accepts(grammar, text) == (value in allowed), (schema, text)
            (call,) = AnswerParser("c", AnswerFormat(form), calls).message(text)["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"to": value}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "gemma4", "pythonic"])
def test_a_value_that_the_type_forbids_is_no_choice(name: str) -> None:
    schema = {"type": "string", "enum": ["reef", None, 3]}
    parameters = {"type": "object", "properties": {"to": schema}, "required": ["to"]}
    grammar = grammar_of(name, parameters)
    assert accepts(grammar, written_call(name, "reef"))
    for value in (None, 3):
        assert not accepts(grammar, written_call(name, value))


@pytest.mark.parametrize("name", ["hermes", "gemma4"])
def test_an_argument_has_one_of_the_types_that_its_schema_names(name: str) -> None:
    values: list[tuple[Any, list[Any], list[Any]]] = [
        ({"type": ["string", "null"]}, ["reef", None], [3, [], {}]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["reef", 3], [None, [1]]),
        ({"oneOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]}, [None, [], [1]], [3, [None]]),
        ({"type": "object"}, [{}], [3, None, [1]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}], [3, None]),
        ({"type": "object", "additionalProperties": False}, [{}], [3, None]),
    ]
    for schema, allowed, others in values:
        parameters = {"type": "object", "properties": {"to": schema}, "required": ["to"]}
        grammar = grammar_of(name, parameters)
        for value in [*allowed, *others]:
            assert accepts(grammar, written_call(name, value)) == (value in allowed), (schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"to": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"title": "any"},
        {"$ref": "#/$defs/place", "$defs": {"place": {"properties": {"to": {"type": "integer"}}}}},
    ],
)
def test_arguments_are_an_object_also_if_their_schema_does_not_say_so(schema: dict[str, Any]) -> None:
    """Else the model may write what is no call."""
    for name, call, written in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>', '{"to": 1}'),
        ("gemma4", "<|tool_call>call:fARGUMENTS<tool_call|>", "{to:1}"),
    ):
        grammar = grammar_of(name, schema, "f")
        for arguments in (written, "{}", "5", "null", "[]"):
            is_object = arguments.startswith("{")
            assert accepts(grammar, call.replace("ARGUMENTS", arguments)) == is_object, (name, arguments)


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_an_argument_may_have_thousands_of_choices(name: str) -> None:
    codes = [f"c{number}" for number in range(6500)]
    parameters = {"type": "object", "properties": {"to": {"enum": codes}}, "required": ["to"]}
    grammar = grammar_of(name, parameters)
    assert accepts(grammar, written_call(name, codes[-1]))
    assert not accepts(grammar, written_call(name, "moon"))


def written_call(name: str, value: Any) -> str:
    """A call with one argument, as models of a format write it."""
    bare = value if isinstance(value, str) else json.dumps(value)
    quoted = f'<|"|>{value}<|"|>' if isinstance(value, str) else bare
    in_python = repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
    return {
        "hermes": f'<tool_call>\n{{"name": "swim", "arguments": {{"to": {json.dumps(value)}}}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function=swim>\n<parameter=to>\n{bare}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>swim\n<arg_key>to</arg_key>\n<arg_value>{bare}</arg_value>\n</tool_call>",
        "gemma4": f"<|tool_call>call:swim{{to:{quoted}}}<tool_call|>",
        "pythonic": f"[swim(to={in_python})]",
    }[name]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_what_schemas_say_to_people_is_no_part_of_the_grammar(name: str) -> None:
    place = {"type": "object", "properties": {"description": {"type": "string"}, "title": {"enum": ["reef"]}}}
    plain = {"type": "object", "properties": {"at": place}, "required": ["at"]}
    said = {"title": "t" * 9000, "description": "d" * 9000, "$comment": "c" * 9000}
    shown = {**plain, **said, "properties": {"at": {**place, **said}}}
    with_texts, without = (grammar_of(name, schema) for schema in (shown, plain))
    assert with_texts == without
    assert "description" in without.text


def test_a_name_may_have_any_characters() -> None:
    name = "".join(map(chr, range(1, 0x100))) + '"\\\u2028'
    tool = json.dumps({"function": {"name": name}})
    for form, call in (
        ("hermes", f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'),
        ("mistral", f"[TOOL_CALLS]{name}[ARGS]{{}}"),
    ):
        found = calls_of(form)
        assert accepts(tool_call_grammar([tool], ANY_TOOL, found, {}, single=True), call), form
        message = AnswerParser("c", AnswerFormat(found), CallOptions({name: {}})).message(call)
        assert [one["function"]["name"] for one in message["tool_calls"]] == [name]


def test_special_tokens_are_demanded_by_their_ids() -> None:
    grammar = tool_call_grammar(TOOLS, ANY_TOOL, calls_of("mistral_v3"), {"[TOOL_CALLS]": 5}, single=True)
    assert grammar.text.startswith('start: <[5]> "[" ')
    assert "TOOL_CALLS" not in grammar.text


@pytest.mark.parametrize("form", REASONING_FORMATS, ids=lambda form: form.name)
def test_an_answer_may_think_before_it_matches_its_grammar(form: ReasoningFormat) -> None:
    grammar = Grammar.of_choices(["yes", "no"])
    thought = f"{form.written_opening}A reef?{form.closing}" if form.reasons else ""
    free = after_reasoning(grammar, AnswerFormat(None, form), {}, is_call=False)
    assert accepts(free, f"{form.answer_opening}yes")
    assert accepts(free, f"{thought}{form.after_closing}{form.answer_opening}no")
    assert not accepts(free, f"{thought}{form.after_closing}{form.answer_opening}perhaps")
    if form.reasons:
        inside = after_reasoning(grammar, AnswerFormat(None, form, begins_in_reasoning=True), {}, is_call=False)
        assert accepts(inside, f"A reef?{form.closing}{form.after_closing}{form.answer_opening}yes")
        assert not accepts(inside, f"{form.answer_opening}yes")
        assert accepts(after_reasoning(grammar, AnswerFormat(None, form), {}, is_call=True), "yes")


def branching(levels: int) -> dict[str, Any]:
    """A short schema in which each level refers ten times to the next one."""
    parts = {f"p{at}": {"anyOf": [{"$ref": f"#/$defs/p{at + 1}"}] * 10} for at in range(levels)}
    shapes = {
        f"o{at}": {"type": "object", "properties": {f"k{key}": {"$ref": f"#/$defs/o{at + 1}"} for key in range(10)}}
        for at in range(levels)
    }
    ends = {f"p{levels}": {"type": "integer"}, f"o{levels}": {"type": "string"}}
    properties = {"a": {"$ref": "#/$defs/p0"}, "b": {"$ref": "#/$defs/o0"}}
    return {"type": "object", "properties": properties, "$defs": {**parts, **shapes, **ends}}


def test_in_braces_an_expression_has_operators_whose_operands_are_expressions() -> None:
    operand = {"$ref": "#/$defs/expression"}
    operators = [
        {
            "type": "object",
            "properties": {"is": {"const": name}, "left": operand, "right": operand},
            "required": ["is", "left", "right"],
        }
        for name in ("add", "subtract", "multiply", "divide", "and", "or", "equal")
    ]
    schema = {
        "type": "object",
        "properties": {"value": operand},
        "required": ["value"],
        "$defs": {"expression": {"anyOf": [{"type": "integer"}, *operators]}},
    }
    grammar = grammar_of("gemma4", schema, "f")
    for operand_text, is_expression in (("2", True), ('<|"|>2<|"|>', False), ("{}", False)):
        inner = f'{{is:<|"|>add<|"|>,left:1,right:{operand_text}}}'
        for value in (operand_text, f'{{is:<|"|>or<|"|>,left:{inner},right:3}}'):
            assert accepts(grammar, f"<|tool_call>call:f{{value:{value}}}<tool_call|>") == is_expression, value


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "pythonic"])
def test_a_short_schema_has_no_endless_grammar(name: str) -> None:
    begun = time.process_time()
    assert len(grammar_of(name, branching(8)).text) < 1 << 16
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("is_required", [True, False])
def test_a_long_key_is_not_kept_once_for_each_schema_below_it(is_required: bool) -> None:
    below = [f"k{count}" for count in range(2000)]
    inner: dict[str, Any] = {"type": "object", "properties": {key: {"type": "object"} for key in below}}
    inner |= {"required": below} if is_required else {"minProperties": 1}
    key = "x" * (1 << 16)
    schema = {"type": "object", "properties": {key: inner}, "required": [key]}
    tracemalloc.start()
    try:
        assert endless_schema(schema) == ""
        inner["properties"]["k7"] |= {"properties": {"a": False}, "required": ["a"]}
        assert bool(endless_schema(schema)) == is_required
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "pythonic"])
def test_many_properties_and_many_required_ones_take_little_time(name: str) -> None:
    properties = {f"p{count}": {} for count in range(30_000)}
    schema = {"type": "object", "properties": properties, "required": [f"r{count}" for count in range(30_000)]}
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match=r"^grammar: .* at most \d+ characters"):
        grammar_of(name, schema)
    assert time.process_time() - begun < 3


def test_numbers_of_thousands_of_digits_are_no_error_of_the_server() -> None:
    assert endless_schema({"allOf": [{}], "$ref": f"#/allOf/{'9' * 5000}"}) == ""
    assert endless_schema({"type": "array", "prefixItems": [False], "minItems": 10**400}) != ""
    assert endless_rule(f'start: "a" start{{{"0" * 5000},3}}') == ""
    assert endless_rule(f'start: "a" start{{{"0" * 5000}1,3}}') != ""


async def test_grammars_of_calls_are_made_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, list[str]] = {}

    def noted(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        def make(*values: Any, **named: Any) -> Any:
            threads.setdefault(name, []).append(threading.current_thread().name)
            return made(*values, **named)

        return make

    for name in ("tool_call_grammar", "functions_of"):
        monkeypatch.setattr(constraints, name, noted(name, getattr(constraints, name)))
    api = HttpApi(tmp_path, limits=LimitsSection())
    api.engine.context = 4096
    long_reference = wrong_tool({"allOf": [{}], "$ref": f"#/allOf/{'9' * 5000}"})
    async with api.http:
        assert (await api.chat(tools=[SWIM], tool_choice="required")).status_code == 200
        for wrong in (wrong_tool({"type": "fish"}), long_reference):
            api.engine.context = 1 << 20
            refused = await api.chat(tools=[SWIM, wrong], tool_choice="required")
            assert error_of(refused)["param"] == "tools[1].function.parameters"
    assert {name: len(found) for name, found in threads.items()} == {"tool_call_grammar": 3, "functions_of": 2}
    assert all(thread.startswith("texts") for found in threads.values() for thread in found)


async def test_tools_whose_grammar_is_too_long_are_refused_by_name(tmp_path: Path) -> None:
    model = MarkingModel(tmp_path, "", Parsers("gemma4"))
    model.engine.context = 1 << 16
    places = {f"p{count}": {"$ref": "#/$defs/long"} for count in range(600)}
    long = {"type": "object", "properties": places, "$defs": {"long": {"const": "x" * 2000}}}
    body = {"messages": HI, "tools": [SWIM, wrong_tool(long)], "tool_choice": "required"}
    refused = await model.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "tools"), refused.text


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(600):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match=r"^grammar: .* fewer levels"):
        grammar_of(CALL_FORMATS[0].name, {"type": "object", "properties": {"a": schema}})


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
        tool_call_grammar(tools, required, CALL_FORMATS[-3], {}, single=False)
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
            ({"tools": [SWIM, {"function": {"name": "a", "parameters": True}}]}, "tools[1].function.parameters"),
        ]
        for wrong, field in values:
            body = {"messages": HI, "tools": [SWIM], "tool_choice": "required", **wrong}
            assert error_of(await api.chat(**body))["param"] == field


async def test_the_tool_whose_own_parameters_are_wrong_is_named(tmp_path: Path) -> None:
    """Not one with long descriptions, which are not compiled, and not one that the answer must not call."""
    long, fish = "x" * MAX_GRAMMAR_BYTES, wrong_tool({"type": "fish"})
    wordy = {"function": {"name": "wordy", "parameters": {**PLACE, "description": long}}}
    large = {"function": {"name": "large", "parameters": {"type": "object", "properties": {"a": {"const": long}}}}}
    chosen = {"type": "function", "function": {"name": "large"}}
    api = HttpApi(tmp_path, limits=LimitsSection())
    api.engine.context = 1 << 20
    async with api.http:
        assert (await api.chat(tools=[wordy], tool_choice="required")).status_code == 200
        for tools, choice in (([wordy, fish], "required"), ([fish, large], chosen)):
            refused = await api.chat(tools=tools, tool_choice=choice)
            assert error_of(refused)["param"] == "tools[1].function.parameters", refused.text
