"""Reasoning and calls of tools in the text of answers, however the text is split."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.core.answer_format import ToolFormat
from cluster.ingress.openai.parsing.answer_parser import AnswerParser, ReasoningParser
from cluster.ingress.openai.parsing.call_parser import CallOptions, CallParser

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.MISTRAL
Calls = list[tuple[str, str]]

CASES: list[tuple[ToolFormat, str, str | None, Calls]] = [
    (
        HERMES,
        'Sure.\n\n<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1,{}]}}\n</tool_call>\n',
        "Sure.",
        [("f", '{"a": "}{\\"", "b": [1,{}]}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    (
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"arguments": {"x": 2}, "name": "g"}]</tool_call> done ',
        "done ",
        [("f", '{"a": 1}'), ("g", '{"x": 2}')],
    ),
    (HERMES, "a <tool_cal b <tool_call>hello</tool_call> c", "a <tool_cal b <tool_call>hello</tool_call> c", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', None, [("f", '{"a": ')]),
    (HERMES, '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    (HERMES, '<tool_call>{"x": 1}</tool_call>tail', '<tool_call>{"x": 1}</tool_call>tail', []),
    (HERMES, "", "", []),
    (
        LLAMA,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    (LLAMA, '{"temperature": 5} is it', '{"temperature": 5} is it', []),
    (LLAMA, "plain text\n", "plain text\n", []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (MISTRAL, 'hm[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "hm", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
    (MISTRAL, "[TOOL_CALLS] nothing at all", "[TOOL_CALLS] nothing at all", []),
]  # fmt: skip


def split(text: str, cuts: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(parser: AnswerParser, parts: list[str], *, stopped: bool = True) -> dict[str, Any]:
    """What a client has that joins all deltas."""
    content, reasoning, calls = "", "", []
    for delta in (*map(parser.delta, parts), parser.last_delta(stopped=stopped)):
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": calls}


def ways_to_split(text: str) -> list[list[int]]:
    draw, inside = random.Random(1), range(1, len(text))
    some = [sorted(draw.sample(inside, min(3, len(inside)))) for _ in range(50)]
    return [[], [*inside], *some]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_separated_from_the_content(form: ToolFormat, text: str, content: str | None, calls: Calls) -> None:
    message = AnswerParser("c", None, CallParser(form)).message(text)
    assert message["content"] == content
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert found == calls
    for cuts in ways_to_split(text):
        parts = streamed(AnswerParser("c", None, CallParser(form)), split(text, cuts))
        assert parts["content"] == (content or "")
        assert parts["calls"] == [[f"c{index}", *call] for index, call in enumerate(calls)]


def test_without_parallel_calls_only_the_first_one_is_returned() -> None:
    text = CASES[1][1]
    message = AnswerParser("c", None, CallParser(HERMES, CallOptions(parallel=False))).message(text)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("stopped", [False, True])
def test_an_answer_that_must_be_a_call_has_no_content(form: ToolFormat, stopped: bool) -> None:
    """Nothing of the markup reaches the client, wherever the answer is cut."""
    text = {
        HERMES: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        LLAMA: '{"name": "f", "parameters": {"a": 1}}',
        MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    }[form]
    for length in range(len(text) + 1):
        parser = AnswerParser("c", None, CallParser(form, CallOptions(forced=True)))
        found = streamed(parser, list(text[:length]), stopped=stopped)
        assert found["content"] == ""
        assert '{"a": 1}'.startswith("".join(call[2] for call in found["calls"]))


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
def test_where_stops_may_end_an_answer_a_call_is_passed_on_when_it_is_whole(form: ToolFormat) -> None:
    opening = {HERMES: "<tool_call>", MISTRAL: "[TOOL_CALLS]["}[form]
    text = f'Yes. {opening}{{"name": "f", "arguments": {{"a": 1}}'
    for length in range(len("Yes. ") + len(opening) + 1, len(text) + 1):
        parts = list(text[:length])
        parser = AnswerParser("c", None, CallParser(form, CallOptions(whole=True)))
        stopped = streamed(parser, parts)
        assert stopped["calls"] == ([["c0", "f", '{"a": 1}']] if length == len(text) else [])
        assert stopped["content"] == "Yes."
        assert parser.ends_with_calls == (length == len(text))
    cut = streamed(AnswerParser("c", None, CallParser(form, CallOptions(whole=True))), list(text[:-2]), stopped=False)
    assert cut["calls"] == [["c0", "f", '{"a": ']]


def test_a_call_with_an_empty_name_or_half_of_a_surrogate_pair_can_be_sent() -> None:
    message = AnswerParser("c", None, CallParser(HERMES)).message(
        '<tool_call>{"name": "", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "g"}</tool_call>'
    )
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert found == [("", "{}"), ("\ufffd", "{}"), ("g", '{"a": "\\ud83d"}')]


def test_arguments_are_streamed_while_they_arrive() -> None:
    parser = AnswerParser("c", None, CallParser(HERMES))
    assert parser.delta('<tool_call>{"name": "f", "arguments": {"a')["tool_calls"][1]["function"] == {
        "arguments": '{"a'
    }
    assert parser.delta('bc": 1')["tool_calls"] == [{"index": 0, "function": {"arguments": 'bc": 1'}}]


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
    def parser(*, include: bool = True) -> AnswerParser:
        return AnswerParser("c", ReasoningParser(begins_inside=inside), None, include)

    thought = {} if reasoning is None else {"reasoning_content": reasoning, "reasoning": reasoning}
    assert parser().message(text) == {"content": content, **thought}
    assert parser(include=False).message(text) == {"content": content}
    for cuts in ways_to_split(text):
        parts = streamed(parser(), split(text, cuts))
        assert (parts["content"], parts["reasoning"]) == (content, reasoning or "")
