"""Reasoning and calls of tools in the text of answers, in every format of models and however the text is split."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.core.answer_format import AnswerFormat, CallFormat, ReasoningFormat
from cluster.core.answer_format_rows import CALL_FORMATS, REASONING_FORMATS
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.call_reader import CallOptions
from cluster.ingress.openai.parsing.parts import PartKind

PLACE = {"type": "object", "properties": {"to": {"type": "string"}, "depth": {"type": "integer"}}}
TOOLS: dict[str, Any] = {"swim": PLACE, "rest": {}, "f": {}, "g": {}}
THOUGHT, SAID = "A reef?\nIt is near.", "On my way."
SWIM: tuple[str, Any] = ("swim", {"to": 'reef "A" <b>', "depth": 3})
REST: tuple[str, Any] = ("rest", {})
Calls = list[tuple[str, Any]]


def calls_of(name: str) -> CallFormat:
    return next(form for form in CALL_FORMATS if form.name == name)


def reasoning_of(name: str) -> ReasoningFormat:
    return next(form for form in REASONING_FORMATS if form.name == name)


def parser_of(
    calls: str | None, reasoning: str | None = None, *, begins: bool = False, include: bool = True, **options: Any
) -> AnswerParser:
    form = AnswerFormat(
        None if calls is None else calls_of(calls), None if reasoning is None else reasoning_of(reasoning), begins
    )
    return AnswerParser("c", form, CallOptions(TOOLS, **options), include_reasoning=include)


def read(parser: AnswerParser, parts: list[str], *, stopped: bool = True) -> tuple[str, str, list[list[str]]]:
    """Content, reasoning and calls that a client has that joins all parts."""
    texts, calls = {PartKind.CONTENT: "", PartKind.REASONING: ""}, []
    for part in (one for text in (*parts, None) for one in _more(parser, text, stopped=stopped)):
        if part.kind is PartKind.CALL:
            calls.append([part.text, ""])
        elif part.kind is PartKind.ARGUMENTS:
            calls[-1][1] += part.text
        else:
            texts[part.kind] += part.text
    return texts[PartKind.CONTENT], texts[PartKind.REASONING], calls


def _more(parser: AnswerParser, text: str | None, *, stopped: bool) -> list[Any]:
    return parser.last_parts(stopped=stopped) if text is None else parser.parts(text)


def ways_to_split(text: str) -> Iterator[list[str]]:
    """The text as a whole, in parts of 1 to 7 characters, and in parts of random lengths."""
    yield [text]
    for length in range(1, 8):
        yield [text[start : start + length] for start in range(0, len(text), length)]
    draw = random.Random(1)
    for _ in range(8):
        cuts = [0, *sorted(draw.randrange(len(text) + 1) for _ in range(4)), len(text)]
        yield [text[start:end] for start, end in itertools.pairwise(cuts)]


ARGUMENTS = json.dumps(SWIM[1])
OBJECTS = f'{{"name": "swim", "arguments": {ARGUMENTS}}}', '{"name": "rest", "arguments": {}}'
PARAMETERS = f'{{"name": "swim", "parameters": {ARGUMENTS}}}', '{"name": "rest", "parameters": {}}'
LIST = f"[{OBJECTS[0]}, {OBJECTS[1]}]"
PYTHON = r'swim(to="reef \"A\" <b>", depth=3)', "rest()"
XML = '<parameter=to>\nreef "A" <b>\n</parameter>\n<parameter=depth>\n3\n</parameter>\n'
NATIVE: dict[str, str] = {
    "openai": f"<|channel|>commentary to=functions.swim <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.rest json<|message|>{}",
    "deepseek_v32": "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"swim\">\n"
    '<｜DSML｜parameter name="to" string="true">reef "A" <b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="depth" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="rest">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>swim\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>rest\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>swim<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>rest<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.swim:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.rest:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "glm45": '<tool_call>swim\n<arg_key>to</arg_key>\n<arg_value>reef "A" <b></arg_value>\n<arg_key>depth</arg_key>\n'
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>rest\n</tool_call>",
    "glm47": '<tool_call>swim<arg_key>to</arg_key><arg_value>reef "A" <b></arg_value><arg_key>depth</arg_key>'
    "<arg_value>3</arg_value></tool_call><tool_call>rest</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="swim">\n<parameter name="to">reef "A" <b></parameter>\n'
    '<parameter name="depth">3</parameter>\n</invoke>\n<invoke name="rest">\n</invoke>\n</minimax:tool_call>',
    "seed_oss": f"<seed:tool_call>\n<function=swim>\n{XML}</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=rest>\n</function>\n</seed:tool_call>",
    "functionary_v31": f"<function=swim>{ARGUMENTS}</function><function=rest>{{}}</function>",
    "qwen3_coder": f"<tool_call>\n<function=swim>\n{XML}</function>\n</tool_call>\n"
    "<tool_call>\n<function=rest>\n</function>\n</tool_call>",
    "minicpm5": '<function name="swim"><param name="to">reef "A" <b></param><param name="depth">3</param></function>'
    '<function name="rest"></function>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="swim">'
    '<steptml:parameter name="to">reef "A" <b></steptml:parameter><steptml:parameter name="depth">3'
    "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="rest"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "gemma4": '<|tool_call>call:swim{to:<|"|>reef "A" <b><|"|>,depth:3}<tool_call|><|tool_call>call:rest{}<tool_call|>',
    "functiongemma": '<start_function_call>call:swim{to:<escape>reef "A" <b><escape>,depth:3}<end_function_call>'
    "<start_function_call>call:rest{}<end_function_call>",
    "mistral_v11": f"[TOOL_CALLS]swim[CALL_ID]abcdefgh1[ARGS]{ARGUMENTS}[TOOL_CALLS]rest[CALL_ID]abcdefgh2[ARGS]{{}}",
    "mistral": f"[TOOL_CALLS]swim[ARGS]{ARGUMENTS}[TOOL_CALLS]rest[ARGS]{{}}",
    "mistral_v3": f"[TOOL_CALLS]{LIST}",
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "swim", "parameters": '
    f'{ARGUMENTS}}},\n    {{"tool_call_id": "1", "tool_name": "rest", "parameters": {{}}}}\n]<|END_ACTION|>',
    "cohere_command_r": 'Action: ```json\n[\n    {\n        "tool_name": "swim",\n        "parameters": '
    f'{ARGUMENTS}\n    }},\n    {{\n        "tool_name": "rest",\n        "parameters": {{}}\n    }}\n]\n```',
    "apertus": f'<|tools_prefix|>[{{"swim": {ARGUMENTS}}}, {{"rest": {{}}}}]<|tools_suffix|>',
    "nemotron_json": f"<TOOLCALL>{LIST}</TOOLCALL>",
    "solar": "<|tool_calls|><|tool_call:begin|>abcdefgh<|tool_call:name|>swim<|tool_call:args|>"
    f"{ARGUMENTS}<|tool_call:end|><|tool_call:begin|>abcdefgi<|tool_call:name|>rest<|tool_call:args|>{{}}"
    "<|tool_call:end|><|calls|>",
    "functools": f" functools{LIST}",
    "phi4_mini_json": f"<|tool_call|>{LIST}<|/tool_call|>",
    "granite": f"<|tool_call|>{LIST}",
    "granite-20b-fc": f"<function_call> {OBJECTS[0]}\n<function_call> {OBJECTS[1]}",
    "gigachat3": f"function call<|role_sep|>\n{OBJECTS[0]}",
    "internlm": f"<|action_start|><|plugin|>\n{PARAMETERS[0]}<|action_end|>",
    "longcat": "\n".join(f"<longcat_tool_call>\n{one}\n</longcat_tool_call>" for one in OBJECTS),
    "minimax": f"<tool_calls>\n{OBJECTS[0]}\n{OBJECTS[1]}\n</tool_calls>",
    "jamba": f"<tool_calls>[\n    {OBJECTS[0]},\n    {OBJECTS[1]}\n]</tool_calls>",
    "lfm2": f"<|tool_call_start|>[{', '.join(PYTHON)}]<|tool_call_end|>",
    "olmo3": "<function_calls>\n{}\n{}\n</function_calls>".format(*PYTHON),
    "functionary_v32": f"swim\n{ARGUMENTS}>>>rest\n{{}}",
    "pythonic": f"[{', '.join(PYTHON)}]",
    "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in OBJECTS),
    "xlam": LIST,
    "llama3_json": PARAMETERS[0],
}  # fmt: skip
"""What models of each format write for two calls, or for one where an answer has no more."""
UNMARKED = ("functionary_v32", "pythonic", "xlam", "llama3_json", "gigachat3")
"""Formats whose calls are found at the beginning of an answer alone."""


def expected(name: str) -> Calls:
    return [SWIM] if calls_of(name).between is None and name != "openai" else [SWIM, REST]


def parsed(calls: list[list[str]]) -> Calls:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_calls_are_read_in_the_format_of_each_model(form: CallFormat) -> None:
    reasoning = "openai_gptoss" if form.name == "openai" else "solar" if form.name == "solar" else None
    for parts in ways_to_split(NATIVE[form.name]):
        content, _, calls = read(parser_of(form.name, reasoning), parts)
        assert (content, parsed(calls)) == ("", expected(form.name))


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_text_around_calls_is_content_however_it_is_split(form: CallFormat) -> None:
    native = NATIVE[form.name]
    if form.name not in UNMARKED:
        native = f"{SAID}\n{native}"
    for text, after in ((native, ""), (f"{native}\n Done. <b", "Done. <b")):
        found = {str(read(parser_of(form.name), parts)) for parts in ways_to_split(text)}
        assert len(found) == 1, found
        content, _, calls = read(parser_of(form.name), [text])
        if form.name not in ("openai", "solar"):  # their markers belong to the format of their reasoning
            assert content == ("" if form.name in UNMARKED else SAID) + after
        assert parsed(calls) == expected(form.name)


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_a_call_of_a_tool_that_was_not_offered_is_text(form: CallFormat) -> None:
    text = NATIVE[form.name].replace("swim", "sink").replace("rest", "roost")
    for parts in ways_to_split(text):
        assert read(parser_of(form.name), parts) == (text, "", [])


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_an_answer_that_must_be_a_call_has_no_content_wherever_it_is_cut(form: CallFormat) -> None:
    text = NATIVE[form.name]
    for length in range(len(text) + 1):
        content, _, _ = read(parser_of(form.name, forced=True), list(text[:length]), stopped=bool(length % 2))
        assert content == ""


@pytest.mark.parametrize("form", [form for form in REASONING_FORMATS if form.reasons], ids=lambda form: form.name)
def test_what_a_model_thinks_is_apart_from_its_content_and_its_calls(form: ReasoningFormat) -> None:
    thought = f"{form.written_opening}{THOUGHT}\n{form.closing}{form.after_closing}"
    said = form.frame[0] + form.answer_opening + SAID + form.frame[1]
    for answer, begins in ((thought + said, False), (thought.removeprefix(form.written_opening) + said, True)):
        for parts in ways_to_split(answer):
            assert read(parser_of("hermes", form.name, begins=begins), parts) == (SAID, THOUGHT, [])
        call = answer.removesuffix(said) + NATIVE["hermes"]
        content, reasoning, calls = read(parser_of("hermes", form.name, begins=begins), list(call))
        assert (content, reasoning, parsed(calls)) == ("", THOUGHT, [SWIM, REST])


def test_a_call_ends_reasoning_that_nothing_else_ends() -> None:
    for parts in ways_to_split(f"<think>{THOUGHT}\n{NATIVE['hermes']}"):
        content, reasoning, calls = read(parser_of("hermes", "qwen3"), parts)
        assert (content, reasoning, parsed(calls)) == ("", THOUGHT, [SWIM, REST])


def test_a_thought_goes_on_after_a_call_in_it() -> None:
    text = f"<think>{THOUGHT}\n{NATIVE['hermes']}\nThat is it.\n</think>\n\n{SAID}"
    for parts in ways_to_split(text):
        content, reasoning, calls = read(parser_of("hermes", "qwen3"), parts)
        assert (content, reasoning, parsed(calls)) == (SAID, f"{THOUGHT}That is it.", [SWIM, REST])


def test_the_channels_of_harmony_go_where_they_belong() -> None:
    text = (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>{SAID}<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|> More.<|end|><|start|>assistant<|channel|>final <|constrain|>"
        "json<|message|>Done.<|return|>"
    )
    for parts in ways_to_split(text):
        assert read(parser_of("openai", "openai_gptoss"), parts) == (f"{SAID}Done.", f"{THOUGHT} More.", [])


OWN: list[tuple[str, str, str, list[list[str]]]] = [
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"arguments": {"x": 2}, "name": "g"}]</tool_call> done ',
        "done ",
        [["f", '{"a": 1}'], ["g", '{"x": 2}']],
    ),
    ("hermes", "a <tool_cal b <tool_call>hello</tool_call> c", "a <tool_cal b <tool_call>hello</tool_call> c", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [["f", '{"a": ']]),
    ("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>tail', '<tool_call>{"x": 1}</tool_call>tail', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["f", '{"a": 1}']]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>',
        "",
        [["f", "{}"]],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments":\n{"a\t": "x\n\ty\\n\x01"}}</tool_call>',
        "",
        [["f", '{"a\\t": "x\\n\\ty\\n\\u0001"}']],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": "x\ny"}, "name": "f"}</tool_call>',
        "",
        [["f", '{"a": "x\\ny"}']],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\n', "", [["f", '{"a": "x\\n']]),
    *(  # a line that a shell continues: a backslash before a line break that is not escaped either
        (
            "hermes",
            f"<tool_call>{call}</tool_call>",
            "",
            [["f", '{"a":\n"x \\\\\\n\\\\\\ty\\\\\\n"}']],
        )
        for call in (
            '{"name": "f", "arguments": {"a":\n"x \\\n\\\ty\\\\\n"}}',
            '{"arguments": {"a":\n"x \\\n\\\ty\\\\\n"}, "name": "f"}',
        )
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\\\\\\\\\\n\\"}"}</tool_call>',
        "",
        [["f", '{"a": "x\\\\\\\\\\n"}']],
    ),
    ("hermes", "", "", []),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [["f", '{"a": 1}'], ["g", "{}"]],
    ),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    ("llama3_json", '{"name": "Alice", "age": 30}', '{"name": "Alice", "age": 30}', []),
    ("llama3_json", '{"name": "f", "age": 30}', '{"name": "f", "age": 30}', []),
    ("llama3_json", '{"temperature": 5} is it', '{"temperature": 5} is it', []),
    ("llama3_json", "plain text\n", "plain text\n", []),
    ("mistral", "[TOOL_CALLS] nothing at all", "[TOOL_CALLS] nothing at all", []),
    ("mistral", 'hm[TOOL_CALLS]f{"a": 1}', "hm", [["f", '{"a": 1}']]),
    (
        "pythonic",
        "[f(a=True, b=[1, {'c': None}]), g(\"x\", y='it\\'s')]",
        "",
        [["f", '{"a": true, "b": [1, {"c": null}]}'], ["g", '{"argument0": "x", "y": "it\'s"}']],
    ),
    ("pythonic", "[1, 2] and f(x)", "[1, 2] and f(x)", []),
    ("pythonic", r'[f(a="x\/y")]', "", [["f", '{"a": "x/y"}']]),
    (
        "pythonic",
        "[f(a=\"x\n\ty\", b='it\\'s\n\"', c=[\n1])]",
        "",
        [["f", '{"a": "x\\n\\ty", "b": "it\'s\\n\\"", "c": [1]}']],
    ),
    (
        "pythonic",
        "[f(a=[\n 'x\ny',\r\n 'it\\'s\r\n', \"'\\\n'\\\\\n\"])]",
        "",
        [["f", '{"a": ["x\\ny", "it\'s\\r\\n", "\'\'\\\\\\n"]}']],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=code>\n\n  x = 1\n\n</parameter>\n</function>",
        "",
        [["f", '{"code": "\\n  x = 1\\n"}']],
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a>\ntrue\n</parameter>\n", "", [["f", '{"a": true}']]),
    (
        "glm45",
        "<tool_call>swim\n<arg_key>to</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "",
        [["swim", '{"to": "3"}']],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:{b:[1,<|"|>x,}<|"|>],c:true},d:-2.5}<tool_call|>',
        "",
        [["f", '{"a": {"b": [1, "x,}"], "c": true}, "d": -2.5}']],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), OWN)
def test_what_is_no_call_stays_text_and_what_is_one_has_its_values(
    name: str, text: str, content: str, calls: list[list[str]]
) -> None:
    for parts in ways_to_split(text):
        assert read(parser_of(name), parts) == (content, "", calls)


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (OPTIONAL, "12345", "12345"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": ["string", "array"]}, "[1]", [1]),
        ({"enum": ["1", "a", None]}, "1", "1"),
        ({"enum": ["1", "a", None]}, "null", None),
        ({"enum": ["1", 1]}, "1", 1),
        ({"type": "integer"}, "five", "five"),
        ({}, "5", 5),
    ],
)
@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_an_argument_between_tags_is_what_its_schema_allows(name: str, schema: Any, written: str, value: Any) -> None:
    text = {
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>",
    }[name]
    tools = {"f": {"type": "object", "properties": {"a": schema}}}
    parser = AnswerParser("c", AnswerFormat(calls_of(name)), CallOptions(tools))
    (call,) = parser.message(text)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": value}


def test_keys_of_python_calls_may_be_no_words() -> None:
    """A schema may name an argument `user-id`, and the grammar of a required call writes it so."""
    keys = ("user-id", "user-id-2", "a b", "x.y", "depth")
    text = "[f(user-id=-4, user-id-2='x, y', a b=None, x.y=[1], depth=2), f(-3, 'user-id')]"
    tools = {"f": {"type": "object", "properties": {key: {} for key in keys}}}
    for parts in ways_to_split(text):
        parser = AnswerParser("c", AnswerFormat(calls_of("pythonic")), CallOptions(tools))
        _, _, ((_, first), (_, second)) = read(parser, parts)
        assert json.loads(first) == {"user-id": -4, "user-id-2": "x, y", "a b": None, "x.y": [1], "depth": 2}
        assert json.loads(second) == {"user-id": -3, "user-id-2": "user-id"}


def test_a_message_has_the_parts_of_its_deltas() -> None:
    text = f"{SAID}\n{NATIVE['hermes']}"
    message = parser_of("hermes").message(text)
    assert message["content"] == SAID
    assert [(call["id"], call["function"]["name"]) for call in message["tool_calls"]] == [
        ("c0", "swim"),
        ("c1", "rest"),
    ]
    parser = parser_of("hermes")
    deltas = [*map(parser.delta, text), parser.last_delta(stopped=True)]
    begun = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert [(call["index"], call["id"]) for call in begun] == [(0, "c0"), (1, "c1")]
    assert parser.ends_with_calls


@pytest.mark.parametrize("size", [1, 7, 40, 400])
def test_a_delta_has_one_entry_for_each_call(size: int) -> None:
    """Clients take the first entry alone, or begin a call for each entry of their first chunk, as openai 1 does."""
    written = ('{"name": "swim", "arguments": {"to": "reef"}}', '{"name": "rest", "arguments": {}}')
    text = "Yes. " + "\n".join(f"<tool_call>{call}</tool_call>" for call in written)
    parser, called = parser_of("hermes"), dict[int, Any]()
    for part in (*(text[start : start + size] for start in range(0, len(text), size)), None):
        delta = parser.last_delta(stopped=True) if part is None else parser.delta(part)
        entries = delta.get("tool_calls", [])
        assert len({entry["index"] for entry in entries}) == len(entries)
        for entry in entries:
            call = called.setdefault(entry["index"], {"name": "", "arguments": ""})
            call["name"] += entry["function"].get("name", "")
            call["arguments"] += entry["function"]["arguments"]
            assert ("id" in entry) == ("name" in entry["function"])
    swim, rest = {"name": "swim", "arguments": '{"to": "reef"}'}, {"name": "rest", "arguments": "{}"}
    assert called == {0: swim, 1: rest}


def test_without_parallel_calls_only_the_first_one_is_returned() -> None:
    message = parser_of("hermes", parallel=False).message(NATIVE["hermes"])
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["swim"]


@pytest.mark.parametrize(("name", "opening"), [("hermes", "<tool_call>"), ("mistral_v3", "[TOOL_CALLS][")])
def test_where_stops_may_end_an_answer_a_call_is_passed_on_when_it_is_whole(name: str, opening: str) -> None:
    text = f'Yes. {opening}{{"name": "f", "arguments": {{"a": 1}}'
    for length in range(len("Yes. ") + len(opening) + 1, len(text) + 1):
        parser = parser_of(name, whole=True)
        content, _, calls = read(parser, list(text[:length]))
        assert (content, calls) == ("Yes.", [["f", '{"a": 1}']] if length == len(text) else [])
        assert parser.ends_with_calls == (length == len(text))
    assert read(parser_of(name, whole=True), list(text[:-2]), stopped=False)[2] == [["f", '{"a": ']]


def test_half_of_a_surrogate_pair_can_be_sent() -> None:
    text = '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "g"}</tool_call>'
    assert read(parser_of("hermes"), [text])[2] == [["g", '{"a": "\\ud83d"}']]
    as_text = '<tool_call>{"name": "g", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>'
    assert read(parser_of("hermes"), [as_text])[2] == [["g", '{"a": "\\ud83d"}']]


@pytest.mark.parametrize("length", [1000, 1 << 20])
def test_what_looks_like_calls_is_read_in_time(length: int) -> None:
    text = '<tool_call>{"a":[' * 4500 + '<tool_call>{"name": "f", "arguments": {}}'
    begun = time.process_time()
    content, _, calls = read(parser_of("hermes"), [text[at : at + length] for at in range(0, len(text), length)])
    assert time.process_time() - begun < 5
    assert (content, calls) == (text, [])


def test_white_space_is_searched_for_calls_once() -> None:
    parser = parser_of("hermes", "qwen3")
    begun = time.process_time()
    content, _, calls = read(parser, ["a", *["\n"] * 30_000, "b \n", " <tool_call>", '{"name": "f", "arguments": {}}'])
    assert time.process_time() - begun < 5
    assert (content, calls) == ("a" + "\n" * 30_000 + "b", [["f", "{}"]])


@pytest.mark.parametrize("properties", [None, 3, True, ["to"], "to"])
def test_properties_that_are_no_object_name_no_arguments(properties: Any) -> None:
    form = AnswerFormat(calls_of("pythonic"))
    parser = AnswerParser("c", form, CallOptions({"swim": {"properties": properties}}))
    assert read(parser, ['[swim("reef", depth=3)]'])[2] == [["swim", '{"argument0": "reef", "depth": 3}']]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("hermes", {'<tool_call>{"name": "f", "arguments": {"a': '{"a', 'bc": 1': 'bc": 1'}),
        ("qwen3_coder", {"<function=swim><parameter=to>\nre": '{"to": "re', "ef": "ef", "\n</par": ""}),
        ("pythonic", {"[f(a=1, b": '{"a": 1', "=[2": "", "])": ', "b": [2]}'}),
    ],
)
def test_arguments_are_streamed_while_they_arrive(name: str, texts: dict[str, str]) -> None:
    parser = parser_of(name)
    for text, arguments in texts.items():
        found = [part.text for part in parser.parts(text) if part.kind is PartKind.ARGUMENTS]
        assert "".join(found) == arguments


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nhi\n", "hm", "hi\n"),
        (True, "hm\n</think>ok", "hm", "ok"),
        (True, "never ends", "never ends", ""),
        (False, "<thin", None, "<thin"),
        (False, " no thought </think>", None, " no thought </think>"),
        (False, "<think></think>x", None, "x"),
    ],
)
def test_reasoning_is_separated_from_the_content(inside: bool, text: str, reasoning: str | None, content: str) -> None:
    thought = {} if reasoning is None else {"reasoning_content": reasoning, "reasoning": reasoning}
    assert parser_of(None, "qwen3", begins=inside).message(text) == {"content": content, **thought}
    assert parser_of(None, "qwen3", begins=inside, include=False).message(text) == {"content": content}
    for parts in ways_to_split(text):
        assert read(parser_of(None, "qwen3", begins=inside), parts) == (content, reasoning or "", [])
