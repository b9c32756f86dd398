"""Checks the grammars of requests before they are admitted, and keeps the results."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind, parser_limits, source_of
from cluster.generation.grammar.compiler_process import Compiled, CompilerProcess
from cluster.generation.grammar.compiler_queue import CompilerQueue
from cluster.generation.grammar.endless import endless_rule, endless_schema

QUICK_SECONDS = 0.25
"""Processor time of the first attempt. What takes longer goes on in a process of its own, where it delays its kind."""
COMPILE_SECONDS = 2.0
"""Longest compilation, in seconds of processor time."""
_MOST_RESULTS = 256
"""Most grammars whose result is kept."""
_MOST_ERROR_CHARS = 400


class GrammarChecker:
    """Compiles each new grammar once, in processes of their own with bounded time and memory.

    Kept are results that depend on the grammar alone. A request that is cancelled changes nothing for others.
    """

    def __init__(self, vocabulary: Path) -> None:
        """`vocabulary` is the model's `tokenizer.json`."""
        self._results: OrderedDict[Grammar, Compiled] = OrderedDict()
        quick, slow = self._processes = CompilerProcess(vocabulary), CompilerProcess(vocabulary)
        self._quick = CompilerQueue("quick-grammars", lambda one: _compile(quick, one, QUICK_SECONDS), self._keep_quick)
        self._slow = CompilerQueue("slow-grammars", lambda one: _compile(slow, one, COMPILE_SECONDS), self._keep)

    async def check(self, grammar: Grammar, flow: str = "") -> Grammar:
        """Return the grammar, in Lark's syntax if it is EBNF.

        Clients share the compiler by `flow`. Raises `InvalidRequest` (`grammar`), `Overloaded` and `NotReady`.
        """
        result = self._results.get(grammar)
        if result is None:
            result = await self._quick.compile(grammar, flow)
            if result.was_too_slow:
                result = await self._slow.compile(grammar, flow)
        else:
            self._results.move_to_end(grammar)
        if result.error:
            shown = grammar.text or grammar.kind.value
            raise InvalidRequest("grammar", shown, f"a {_NAMES[grammar.kind]} that can be compiled: {result.error}")
        return Grammar(GrammarKind.GRAMMAR, result.source) if grammar.kind is GrammarKind.GRAMMAR else grammar

    def close(self) -> None:
        """End the processes, if they run."""
        for queue in (self._quick, self._slow):
            queue.close()
        for process in self._processes:
            process.close()

    def _keep_quick(self, grammar: Grammar, result: Compiled) -> None:
        if not result.was_too_slow:
            self._keep(grammar, result)

    def _keep(self, grammar: Grammar, result: Compiled) -> None:
        self._results[grammar] = result
        if len(self._results) > _MOST_RESULTS:
            self._results.popitem(last=False)


def _compile(process: CompilerProcess, grammar: Grammar, seconds: float) -> Compiled:
    """Compile in the process. Raises `NotReady` for a failure that the grammar did not cause."""
    try:
        source = source_of(grammar)
    except (ValueError, RecursionError) as problem:
        return Compiled("", str(problem))
    is_ebnf = grammar.kind is GrammarKind.GRAMMAR
    found = process.compile(source, parser_limits(grammar), is_ebnf=is_ebnf, seconds=seconds)
    error = found.error or _endless(grammar, found.source)
    return Compiled(found.source, " ".join(error.split())[:_MOST_ERROR_CHARS], found.was_too_slow)


def _endless(grammar: Grammar, source: str) -> str:
    """Return why no answer that ends matches a grammar that the library has compiled."""
    match grammar.kind:
        case GrammarKind.GRAMMAR:
            return endless_rule(source)
        case GrammarKind.JSON_SCHEMA:
            return endless_schema(json.loads(grammar.text))
    return ""


_NAMES = {
    GrammarKind.JSON_OBJECT: "JSON object",
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
}
