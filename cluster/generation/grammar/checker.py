"""Checks the grammars of requests before they are admitted, and keeps the results."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from cluster.core.errors import InvalidRequest
from cluster.core.grammar.grammar import Grammar, GrammarKind
from cluster.core.grammar.source import source_of
from cluster.generation.grammar.compiler_process import CompilerProcess

_MOST_RESULTS = 256
"""Most grammars whose result is kept."""
_MOST_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class _Result:
    """What the compilation of a grammar showed."""

    grammar: Grammar
    error: str


class GrammarChecker:
    """Compiles each new grammar once, in a process of its own with bounded time and memory."""

    def __init__(self) -> None:
        self._process = CompilerProcess()
        self._results: OrderedDict[Grammar, _Result] = OrderedDict()
        self._turn = asyncio.Lock()

    async def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar, in Lark's syntax if it is EBNF. Raises `InvalidRequest` (`grammar`)."""
        if grammar not in self._results:
            async with self._turn:
                if grammar not in self._results:
                    self._results[grammar] = await asyncio.to_thread(self._compile, grammar)
        result = self._results[grammar]
        self._results.move_to_end(grammar)
        if len(self._results) > _MOST_RESULTS:
            self._results.popitem(last=False)
        if result.error:
            shown = grammar.text or grammar.kind.value
            raise InvalidRequest("grammar", shown, f"a {_NAMES[grammar.kind]} that can be compiled: {result.error}")
        return result.grammar

    def close(self) -> None:
        """End the process, if it runs."""
        self._process.close()

    def _compile(self, grammar: Grammar) -> _Result:
        try:
            source = source_of(grammar)
        except (ValueError, RecursionError) as problem:
            return _Result(grammar, str(problem))
        is_ebnf = grammar.kind is GrammarKind.GRAMMAR
        lark, error = self._process.compile(source, is_ebnf=is_ebnf)
        if error:
            return _Result(grammar, " ".join(error.split())[:_MOST_ERROR_CHARS])
        return _Result(Grammar(GrammarKind.GRAMMAR, lark) if is_ebnf else grammar, "")


_NAMES = {
    GrammarKind.JSON_OBJECT: "JSON object",
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
}
