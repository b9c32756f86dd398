"""Grammars are checked in a process of its own: hostile ones are refused in bounded time, and stop nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from cluster.core.grammar.grammar import Grammar, GrammarKind
from cluster.generation.grammar import compiler_process
from cluster.generation.grammar.checker import GrammarChecker
from tests.support.deadline import deadline

SECONDS = 60.0
"""Far above any compilation, also on a busy machine."""


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
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
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
async def test_a_hostile_grammar_is_refused_in_bounded_time(
    checker: GrammarChecker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_process, "COMPILE_SECONDS", 0.3)
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
}


@pytest.mark.parametrize("name", sorted(GOOD))
async def test_a_good_grammar_stays_as_it_is(checker: GrammarChecker, name: str) -> None:
    async with deadline(SECONDS):
        assert await checker.check(GOOD[name]) == GOOD[name]


async def test_ebnf_is_translated(checker: GrammarChecker) -> None:
    async with deadline(SECONDS):
        found = await checker.check(lark('root ::= "yes" | "no" root\n'))
    assert found.kind is GrammarKind.GRAMMAR
    assert "start:" in found.text and "::=" not in found.text


async def test_a_process_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker()
    monkeypatch.setattr(compiler_process, "COMPILE_SECONDS", 0.05)
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest, match="takes more than"):
            await checker.check(HOSTILE["many patterns at once"])
        monkeypatch.setattr(compiler_process, "COMPILE_SECONDS", 30.0)
        assert await checker.check(regex("ab*")) == regex("ab*")
        process = checker._process._process
        assert process is not None
        process.kill()
        process.wait()
        found = await asyncio.gather(*(checker.check(regex(f"a{{{count}}}")) for count in range(1, 9)))
    assert found == [regex(f"a{{{count}}}") for count in range(1, 9)]
    checker.close()
    checker.close()


async def test_a_clients_own_options_of_the_library_have_no_effect(checker: GrammarChecker) -> None:
    schema = {"type": "object", "x-guidance": {"no such option": True}}
    async with deadline(SECONDS):
        await checker.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
