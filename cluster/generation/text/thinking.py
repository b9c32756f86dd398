"""The budget of what a model thinks, as the tokens that begin and end its thinking."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.answer_format import AnswerFormat
from cluster.core.request import GenerationRequest
from cluster.generation.text.prompts import THINKING_END, THINKING_START, begins_thinking
from cluster.generation.text.tokenizer import Tokenizer


class ReasoningCount:
    """Counts the tokens of an answer with which the model thinks, its markers included."""

    __slots__ = ("_is_open", "_text", "_tokens", "count")

    def __init__(self, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt ends after `<think>`."""
        self.count = 0
        """Tokens that are certain to be thought."""
        self._text = THINKING_START if begins_inside else ""
        self._tokens = 0
        self._is_open = True

    def push(self, text: str) -> None:
        """Add the text of the answer's next token."""
        if not self._is_open:
            return
        self._tokens += 1
        self._text = (self._text + text).lstrip()
        if not self._text.startswith(THINKING_START):
            self._is_open = THINKING_START.startswith(self._text)
            return
        self.count = self._tokens
        self._is_open = THINKING_END not in self._text
        # Enough of the text stays to find an end that spans tokens.
        self._text = THINKING_START + self._text[len(THINKING_START) :][-len(THINKING_END) :]


def with_bounded_thinking(
    request: GenerationRequest, tokenizer: Tokenizer, form: AnswerFormat | None
) -> GenerationRequest:
    """Return the request with the tokens that begin and end thinking, if it has a budget for it.

    `form` is that of the answer to a conversation. Without a budget where it has no effect: the model does not think,
    or the answer matches a grammar from its start.
    """
    thinking = request.sampling.thinking
    if thinking is None:
        return request
    if not tokenizer.reasons or request.sampling.grammar is not None:
        return replace(request, sampling=replace(request.sampling, thinking=None))
    is_begun = begins_thinking(tokenizer, request.prompt) if form is None else form.begins_in_reasoning
    start = () if is_begun else tokenizer.encode_answer(THINKING_START)
    thinking = replace(thinking, start=start, end=tokenizer.encode_answer(THINKING_END))
    return replace(request, sampling=replace(request.sampling, thinking=thinking))
