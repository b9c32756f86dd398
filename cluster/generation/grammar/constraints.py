"""The grammars of requests: those that clients send, which are compiled once, and those of required calls of tools."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.core.answer_format import AnswerFormat, CallFormat
from cluster.core.errors import InvalidRequest
from cluster.core.fair_queue import flow_of
from cluster.core.grammar import Grammar, GrammarKind, lark_source, parser_limits, source_of
from cluster.core.json_schema import without_annotations
from cluster.core.request import GenerationRequest
from cluster.generation.grammar.compiler_process import Compiled, CompilerProcess
from cluster.generation.grammar.compiler_queue import CompilerQueue
from cluster.generation.grammar.endless import endless_rule, endless_schema
from cluster.generation.grammar.references import reference_problem
from cluster.generation.grammar.tool_calls import (
    ANY_TOOL,
    Specials,
    functions_of,
    text_before,
    tool_call_grammar,
    written,
)
from cluster.generation.text.prompts import ChatPrompt
from cluster.generation.text.tokenizer import Tokenizer
from cluster.generation.validate import ValidatedRequest
from cluster.wire.codec.grammar import check_grammar_size

_LINE_ENDS = r"/\n{0,2}/"


class Constraints:
    """Gives requests the grammars that they need, and refuses those that cannot be compiled.

    Grammars of calls are made in the threads for texts: tools may be as long as a body, and the event loop serves all.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._checker = None if tokenizer.file is None else GrammarChecker(tokenizer.file)

    async def apply(self, request: GenerationRequest, valid: ValidatedRequest, form: AnswerFormat) -> GenerationRequest:
        """Return the request with a grammar that compiles, if it has one or requires a call of a tool.

        Raises `InvalidRequest` (`grammar`, `tool_choice`, `tools`).
        """
        own = request.sampling.grammar
        is_call = isinstance(valid.prompt, ChatPrompt) and valid.prompt.required_tool is not None
        grammar = await self._grammar(own, valid, form)
        if grammar is None:
            return request
        whole = after_reasoning(grammar, form, self._tokenizer.special_tokens_in(form.markers), is_call=is_call)
        if whole != grammar:
            try:
                grammar = await self._checked(whole, valid)
            except InvalidRequest as error:
                raise error.renamed("tools") if is_call else error from None
        return replace(request, sampling=replace(request.sampling, grammar=grammar))

    async def _grammar(self, grammar: Grammar | None, valid: ValidatedRequest, form: AnswerFormat) -> Grammar | None:
        prompt = valid.prompt
        if not isinstance(prompt, ChatPrompt) or prompt.required_tool is None or form.calls is None:
            return None if grammar is None else await self._checked(grammar, valid)
        if grammar is not None:
            raise InvalidRequest("grammar", grammar.kind.value, "left out where a tool is required")
        if valid.answers.beam is not None:
            raise InvalidRequest("tool_choice", prompt.required_tool, "left out with beam search")
        return await self._calls(prompt, prompt.required_tool, form.calls, valid)

    async def _calls(self, prompt: ChatPrompt, required: str, form: CallFormat, valid: ValidatedRequest) -> Grammar:
        tools, specials = prompt.options.tools, self._tokenizer.special_tokens_in(tuple(form.markers))
        chars, single = sum(map(len, tools)), prompt.single_call
        try:
            calls = await self._tokenizer.texts.run(
                chars, tool_call_grammar, tools, required, form, specials, single=single
            )
            return await self._checked(calls, valid)
        except InvalidRequest as error:
            if error.field != "grammar":
                raise
            raise await self._of_one_tool(tools, required, valid, error) from None

    async def _of_one_tool(
        self, tools: Sequence[str], required: str, valid: ValidatedRequest, error: InvalidRequest
    ) -> InvalidRequest:
        """Return the error of the first tool that may be called and does not compile alone, or that of all together."""
        for position, grammar in await self._tokenizer.texts.run(sum(map(len, tools)), _alone, tools, required):
            try:
                await self._checked(grammar, valid)
            except InvalidRequest as own:
                return own.renamed(f"tools[{position}].function.parameters")
        return error.renamed("tools")

    async def _checked(self, grammar: Grammar, valid: ValidatedRequest) -> Grammar:
        if self._checker is None:
            bound = "left out: this model has no tokenizer.json, so its tokens have no text that a grammar could match"
            raise InvalidRequest("grammar", grammar.kind.value, bound)
        return await self._checker.check(grammar, flow_of(valid.client, valid.request_id))


def _alone(tools: Sequence[str], required: str) -> list[tuple[int, Grammar]]:
    """Return place and grammar of the parameters of each tool that may be called."""
    return [
        (position, Grammar.of_schema(without_annotations(function["parameters"])))
        for position, function in enumerate(functions_of(tools))
        if required in (ANY_TOOL, function["name"])
    ]


def after_reasoning(grammar: Grammar, form: AnswerFormat, specials: Specials, *, is_call: bool) -> Grammar:
    """Return the grammar of an answer that may think before it matches `grammar`, in the form of its model.

    Where the prompt ends within reasoning, the answer begins with reasoning; else the model decides whether it thinks.
    `is_call`: the grammar is that of calls of tools, in front of which the model does not open its content. Returns the
    grammar itself where the model writes neither reasoning nor an opening of its content.
    """
    reasoning = form.reasoning
    if reasoning is None or not (reasoning.reasons or reasoning.answer_opening):
        return grammar
    attribute, body = text_before(reasoning.closing, specials)
    opening = "" if form.begins_in_reasoning else f"{_LINE_ENDS} {written(reasoning.written_opening, specials)}"
    thought = f"{opening} thought {_LINE_ENDS} {written(reasoning.after_closing, specials)}"
    before = f"({thought})" if form.begins_in_reasoning else f"({thought})?"
    content = "" if is_call else written(reasoning.answer_opening, specials)
    lines = (
        f"start: {before} {content} answer",
        f"thought{attribute}: {body}",
        f"answer: %lark {{\n{lark_source(grammar)}\n}}",
    )
    return Grammar(GrammarKind.GRAMMAR, "\n".join(lines))


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
        check_grammar_size(
            "grammar", grammar.text
        )  # that of required calls, or of what follows reasoning, may be too long
        result = self._results.get(grammar)
        if result is None:
            result = await self._quick.compile(grammar, flow)
            if result.was_too_slow:
                result = await self._slow.compile(grammar, flow)
        else:
            self._results.move_to_end(grammar)
        if result.reference:
            raise InvalidRequest("grammar", result.reference, result.error)
        if result.error:
            shown = grammar.text or grammar.kind.value
            raise InvalidRequest("grammar", shown, f"a {_NAMES[grammar.kind]} that can be compiled: {result.error}")
        if grammar.kind is not GrammarKind.GRAMMAR:
            return grammar
        translated = Grammar(GrammarKind.GRAMMAR, result.source)
        check_grammar_size("grammar", translated.text)  # EBNF may be longer in Lark's syntax
        return translated

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
    found = process.compile(source, parser_limits(), is_ebnf=is_ebnf, seconds=seconds)
    error = found.error or _endless(grammar, found.source)
    if found.error and grammar.kind is GrammarKind.JSON_SCHEMA:
        refused = reference_problem(json.loads(grammar.text), found.error)
        if refused is not None:
            return Compiled("", refused[1], found.was_too_slow, refused[0])
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
