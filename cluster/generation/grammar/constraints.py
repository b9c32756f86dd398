"""The grammars of requests: those that clients send, and those of required calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.answer_format import AnswerFormat, ToolFormat
from cluster.core.errors import InvalidRequest
from cluster.core.fair_queue import flow_of
from cluster.core.grammar import Grammar
from cluster.core.request import GenerationRequest
from cluster.generation.grammar.checker import GrammarChecker
from cluster.generation.grammar.tool_calls import MISTRAL_OPENING, functions_of, tool_call_grammar, with_special_opening
from cluster.generation.text.prompts import ChatPrompt
from cluster.generation.text.tokenizer import Tokenizer
from cluster.generation.validate import ValidatedRequest


class Constraints:
    """Gives requests the grammars that they need, and refuses those that cannot be compiled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._checker = None if tokenizer.file is None else GrammarChecker(tokenizer.file)

    async def apply(self, request: GenerationRequest, valid: ValidatedRequest, form: AnswerFormat) -> GenerationRequest:
        """Return the request with a grammar that compiles, if it has one or requires a call of a tool.

        Raises `InvalidRequest` (`grammar`, `tool_choice`, `tools`).
        """
        grammar = await self._grammar(request.sampling.grammar, valid)
        if grammar is None:
            return request
        if form.begins_in_reasoning:
            bound = "left out, or reasoning turned off by chat_template_kwargs: this prompt ends where reasoning begins"
            raise InvalidRequest("grammar", grammar.kind.value, bound)
        return replace(request, sampling=replace(request.sampling, grammar=grammar))

    async def _grammar(self, grammar: Grammar | None, valid: ValidatedRequest) -> Grammar | None:
        prompt = valid.prompt
        if not isinstance(prompt, ChatPrompt) or prompt.required_tool is None:
            return None if grammar is None else await self._checked(grammar, valid)
        if grammar is not None:
            raise InvalidRequest("grammar", grammar.kind.value, "left out where a tool is required")
        if valid.answers.beam is not None:
            raise InvalidRequest("tool_choice", prompt.required_tool, "left out with beam search")
        form = self._tokenizer.tool_format
        tools, required = prompt.options.tools, prompt.required_tool
        try:
            calls = tool_call_grammar(tools, required, form, single=prompt.single_call)
            calls = await self._checked(calls, valid)
        except InvalidRequest as error:
            raise error if error.field != "grammar" else await self._of_one_tool(tools, valid, error) from None
        opening = self._tokenizer.special_token(MISTRAL_OPENING) if form is ToolFormat.MISTRAL else None
        return calls if opening is None else with_special_opening(calls, opening)

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
