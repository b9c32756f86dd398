"""The grammars of requests: those that clients send, and those of required calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.answer_format import AnswerFormat, CallFormat
from cluster.core.errors import InvalidRequest
from cluster.core.fair_queue import flow_of
from cluster.core.grammar import Grammar, GrammarKind, lark_source
from cluster.core.request import GenerationRequest
from cluster.generation.grammar.checker import GrammarChecker
from cluster.generation.grammar.tool_calls import Specials, functions_of, text_before, tool_call_grammar, written
from cluster.generation.text.prompts import ChatPrompt
from cluster.generation.text.tokenizer import Tokenizer
from cluster.generation.validate import ValidatedRequest

_LINE_ENDS = r"/\n{0,2}/"


class Constraints:
    """Gives requests the grammars that they need, and refuses those that cannot be compiled."""

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
            grammar = await self._checked(whole, valid)
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
        try:
            calls = tool_call_grammar(tools, required, form, specials, single=prompt.single_call)
            return await self._checked(calls, valid)
        except InvalidRequest as error:
            raise error if error.field != "grammar" else await self._of_one_tool(tools, valid, error) from None

    async def _of_one_tool(
        self, tools: Sequence[str], valid: ValidatedRequest, error: InvalidRequest
    ) -> InvalidRequest:
        """Return the error of the first tool whose parameters cannot be compiled alone, or that of all together."""
        for position, function in enumerate(functions_of(tools)):
            try:
                await self._checked(Grammar.of_schema(function["parameters"]), valid)
            except InvalidRequest as own:
                return own.renamed(f"tools[{position}].function.parameters")
        return error.renamed("tools")

    async def _checked(self, grammar: Grammar, valid: ValidatedRequest) -> Grammar:
        if self._checker is None:
            bound = "left out: this model has no tokenizer.json, so its tokens have no text that a grammar could match"
            raise InvalidRequest("grammar", grammar.kind.value, bound)
        return await self._checker.check(grammar, flow_of(valid.client, valid.request_id))


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
