"""Grammars are checked in a process of its own: hostile ones are refused in bounded time, and stop nobody."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.core.answer_format import AnswerFormat, ReasoningFormat
from cluster.core.bounds import MAX_CHOICES, MAX_GRAMMAR_BYTES
from cluster.core.errors import InvalidRequest, NotReady, Overloaded
from cluster.core.grammar import Grammar, GrammarKind
from cluster.generation.grammar import constraints as checker_module
from cluster.generation.grammar.compiler_process import Compiled
from cluster.generation.grammar.compiler_queue import MOST_OF_ONE_FLOW, CompilerQueue
from cluster.generation.grammar.constraints import GrammarChecker, after_reasoning
from tests.support.deadline import deadline
from tests.support.models import tiny_tokenizer

SECONDS = 60.0
"""Far above any compilation, also on a busy machine."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("vocabulary")) / "tokenizer.json"


@pytest.fixture
def new_checker(vocabulary: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(vocabulary)
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def checker(vocabulary: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(vocabulary)
    yield checker
    checker.close()


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.GRAMMAR, text)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


PATTERNS = [{"type": "string", "pattern": f".*x{{{count}}}.*"} for count in range(2, 40)]
BRANCHES = [{"anyOf": [{"properties": {f"{name}{i}": {"const": 1}}} for name in "ab"]} for i in range(20)]
ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
LIST = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}
HOSTILE = {
    "brackets": lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "regex brackets": regex("(" * 20_000 + "a" + ")" * 20_000),
    "only recursion": lark("start: start"),
    "unknown rule": lark("start: other"),
    "no syntax": lark("start ="),
    "wrong regex": regex("[a"),
    "look-behind": regex("(?<=a)b"),
    "a reference to itself": Grammar.of_schema({"$ref": "#"}),
    "a reference elsewhere": Grammar.of_schema({"$ref": "http://127.0.0.1/schema.json"}),
    "many patterns at once": Grammar.of_schema({"allOf": PATTERNS}),
    "exponential branches": Grammar.of_schema({"allOf": BRANCHES}),
    "deep": Grammar.of_schema(nested(500)),
    "a wrong type": Grammar.of_schema({"type": "fish"}),
    "an endless rule": lark('start: "a" start'),
    "an endless rule of several texts": lark('start: ("a" | "b") start'),
    "endless rules": lark('start: a\na: "x" b\nb: "y" a{2}'),
    "an endless EBNF": lark('root ::= "a" root'),
    "left recursion without an end": lark('start: start "a"'),
    "a schema that requires itself": Grammar.of_schema(ITSELF),
    "an array of itself": Grammar.of_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    "a definition that requires itself": Grammar.of_schema({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": LIST}}),
    "an object of itself": Grammar.of_schema(
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}
    ),
    "a schema that requires itself inside of a grammar": lark(f"start: %json {json.dumps(ITSELF)}"),
    "more rules at once than the parser holds": lark(
        "start: " + " | ".join(f'"a{i}"' for i in range(MAX_CHOICES + 2500))
    ),
    "properties": Grammar.of_schema({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
async def test_a_hostile_grammar_is_refused_in_bounded_time(
    checker: GrammarChecker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "COMPILE_SECONDS", 0.3)
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest) as caught:
            await checker.check(HOSTILE[name])
        assert caught.value.field == "grammar"
        assert len(str(caught.value)) < 700
        with pytest.raises(InvalidRequest) as again:
            await checker.check(HOSTILE[name])
    assert str(again.value) == str(caught.value)


GOOD = {
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "schema": Grammar.of_schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}),
    "recursive schema": Grammar.of_schema({"type": "object", "additionalProperties": {"$ref": "#"}}),
    "anything": Grammar(GrammarKind.JSON_SCHEMA, "true"),
    "regex": regex("(a/b|\\/\n[/\"'])+\\d{3}"),
    "choice": Grammar.of_choices(["a", 'b"\n\\', "ü", "<[3]>"]),
    "lark": lark('start: "a" start | WORD\nWORD: /[a-z]+/'),
    "left recursion": lark('start: start "a" | "b"'),
    "recursion that may be left out": lark('start: "x" start? a{0,2} [a]\na: "y" a'),
    "an object that may be empty": Grammar.of_schema({"type": "object", "additionalProperties": {"$ref": "#"}}),
    "a list": Grammar.of_schema(
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
    ),
    "a tree": Grammar.of_schema({"type": "array", "items": {"$ref": "#"}}),
    "as many choices as are allowed": Grammar.of_choices([f"the {i}th of the choices" for i in range(MAX_CHOICES)]),
    "as many choices after reasoning": after_reasoning(
        Grammar.of_choices([f"the {i}th fish" for i in range(MAX_CHOICES)]),
        AnswerFormat(reasoning=ReasoningFormat("qwen3", "<think>", "</think>")),
        {},
        is_call=False,
    ),
    "other choices": Grammar.of_choices([chr(0x4E00 + i) for i in range(MAX_CHOICES)]),
    "every control character": Grammar.of_choices([f"a{chr(i)}b" for i in (*range(1, 32), *range(0x7F, 0xA0))]),
    "control characters in a regex": regex("a\x7f[\x01-\x09]\r\x80"),
}


@pytest.mark.parametrize("name", sorted(GOOD))
async def test_a_good_grammar_stays_as_it_is(checker: GrammarChecker, name: str) -> None:
    async with deadline(SECONDS):
        assert await checker.check(GOOD[name]) == GOOD[name]


async def test_a_grammar_that_no_target_takes_is_refused(checker: GrammarChecker) -> None:
    """What the client sent is shorter: its grammar was made longer, as for calls of tools and after reasoning."""
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest, match=f"at most {MAX_GRAMMAR_BYTES} bytes") as caught:
            await checker.check(lark('start: "a"\n// ' + "x" * MAX_GRAMMAR_BYTES))
    assert caught.value.field == "grammar"


@pytest.mark.parametrize("kind", [kind for kind in GrammarKind if kind is not GrammarKind.JSON_OBJECT])
async def test_what_is_too_long_is_refused_before_it_is_compiled(
    new_checker: GrammarChecker, kind: GrammarKind
) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_GRAMMAR_BYTES} bytes"):
        await new_checker.check(Grammar(kind, "ü" * (MAX_GRAMMAR_BYTES // 2 + 1)))
    assert all(process._process is None for process in new_checker._processes)


async def test_ebnf_is_translated(checker: GrammarChecker) -> None:
    async with deadline(SECONDS):
        found = await checker.check(lark('root ::= "yes" | "no" root\n'))
    assert found.kind is GrammarKind.GRAMMAR
    assert "start:" in found.text and "::=" not in found.text


@pytest.mark.parametrize(
    "source",
    [
        '\n    ?start: words\n\n    ?words: WORD (" " WORD)*\n    WORD: /[a-z]+/\n',
        '!start: "yes" | "no"',
        'start[max_tokens=5]: "yes" | "no"',
        "%llguidance {}\nstart : /[a-z]+/",
    ],
)
async def test_larks_syntax_stays_as_it_is(checker: GrammarChecker, source: str) -> None:
    """Rules may have a prefix, as in the example of vLLM's documentation, and attributes."""
    async with deadline(SECONDS):
        assert await checker.check(lark(source)) == lark(source)


async def test_a_process_that_ends_is_started_again(
    new_checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "COMPILE_SECONDS", 0.3)
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest, match="takes more than"):
            await new_checker.check(HOSTILE["many patterns at once"])
        assert await new_checker.check(regex("ab*")) == regex("ab*")
        for process in (one._process for one in new_checker._processes):
            assert process is not None and process.poll() is None, "a hostile grammar ends no process"
            process.kill()
            process.wait()
        found = await asyncio.gather(*(new_checker.check(regex(f"a{{{count}}}")) for count in range(1, 9)))
    assert found == [regex(f"a{{{count}}}") for count in range(1, 9)]
    new_checker.close()


async def test_a_client_that_leaves_changes_no_answer_to_others(new_checker: GrammarChecker) -> None:
    """The compilation that it leaves behind is finished before the next one begins."""
    schemas = [Grammar.of_schema({"enum": [f"{number}-{count}" for count in range(500)]}) for number in range(12)]
    async with deadline(SECONDS):
        for number, schema in enumerate(schemas):
            leaving = asyncio.create_task(new_checker.check(schema, "leaving"))
            await asyncio.sleep(0.003 * number)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert await new_checker.check(GOOD["object"], "staying") == GOOD["object"]
            assert await new_checker.check(regex(f"b{{{number}}}"), "staying") == regex(f"b{{{number}}}")
        assert await asyncio.gather(*(new_checker.check(schema, "staying") for schema in schemas)) == schemas


async def test_a_failure_that_the_grammar_did_not_cause_is_not_kept(
    new_checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "COMPILE_SECONDS", 0.3)
    grammar = Grammar.of_schema({"allOf": PATTERNS})
    async with deadline(SECONDS):
        assert await new_checker.check(regex("x")) == regex("x")
        process = new_checker._processes[0]._process
        assert process is not None
        checking = asyncio.create_task(new_checker.check(grammar))
        await asyncio.sleep(0.05)
        process.kill()  # as the kernel does when memory is short
        with pytest.raises(NotReady):
            await checking
        with pytest.raises(InvalidRequest):
            await new_checker.check(grammar)
        assert await new_checker.check(regex("y")) == regex("y")


class _SlowCompiler:
    """Compiles in a time that the grammar's text names, in seconds, and notes the order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __call__(self, grammar: Grammar) -> Compiled:
        self.order.append(grammar.text)
        time.sleep(float(grammar.text.partition(" ")[2]))
        return Compiled(grammar.text)


@pytest.fixture
def compiler() -> _SlowCompiler:
    return _SlowCompiler()


@pytest.fixture
def queue(compiler: _SlowCompiler) -> Iterator[CompilerQueue]:
    queue = CompilerQueue("test", compiler, lambda *_: None)
    yield queue
    queue.close()


async def test_a_client_with_slow_grammars_waits_for_itself(queue: CompilerQueue, compiler: _SlowCompiler) -> None:
    slow = [asyncio.create_task(queue.compile(lark(f"slow{number} 0.05"), "slow")) for number in range(5)]
    await asyncio.sleep(0.02)  # the first one is compiled
    quick = [asyncio.create_task(queue.compile(lark(f"quick{number} 0"), "quick")) for number in range(5)]
    async with deadline(SECONDS):
        await asyncio.gather(*slow, *quick)
    names = [entry.partition(" ")[0] for entry in compiler.order]
    assert names[0] == "slow0"
    assert names[1:6] == [f"quick{number}" for number in range(5)]


async def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(
    queue: CompilerQueue, compiler: _SlowCompiler
) -> None:
    first = asyncio.create_task(queue.compile(lark("first 0.05"), "a"))
    await asyncio.sleep(0.01)
    leaving = [asyncio.create_task(queue.compile(lark("left 0"), flow)) for flow in ("a", "b")]
    one_of_two = [asyncio.create_task(queue.compile(lark("wanted 0"), flow)) for flow in ("a", "b")]
    await asyncio.sleep(0.01)
    for task in (*leaving, one_of_two[0]):
        task.cancel()
    async with deadline(SECONDS):
        await asyncio.gather(first, one_of_two[1])
    assert compiler.order == ["first 0.05", "wanted 0"]


async def test_one_client_has_few_grammars_waiting(queue: CompilerQueue) -> None:
    waiting = [asyncio.create_task(queue.compile(lark(f"{i} 0.001"), "a")) for i in range(MOST_OF_ONE_FLOW + 1)]
    other = asyncio.create_task(queue.compile(lark("other 0"), "b"))
    async with deadline(SECONDS):
        results = await asyncio.gather(*waiting, return_exceptions=True)
        await other
    assert [type(result) for result in results].count(Overloaded) == 1


async def test_a_clients_own_options_of_the_library_have_no_effect(checker: GrammarChecker) -> None:
    schema = {"type": "object", "x-guidance": {"no such option": True}}
    async with deadline(SECONDS):
        await checker.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


async def test_a_vocabulary_that_cannot_be_read_is_read_again(vocabulary: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{", encoding="utf-8")
    checker = GrammarChecker(file)
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            await checker.check(regex("a"))
        shutil.copy(vocabulary, file)
        assert await checker.check(regex("a")) == regex("a")
    checker.close()
