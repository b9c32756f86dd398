"""What a model thinks: its tokens are counted, and its budget becomes the tokens that begin and end it."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.answer_format import AnswerFormat, ReasoningFormat
from cluster.core.request import GenerationRequest
from cluster.generation.text.prompts import begins_reasoning
from cluster.generation.text.tokenizer import Tokenizer


class ReasoningCount:
    """Counts the tokens of an answer with which the model thinks, its markers included."""

    __slots__ = ("_form", "_is_inside", "_is_open", "_opening", "_text", "_tokens", "count")

    def __init__(self, form: ReasoningFormat, *, begins_inside: bool) -> None:
        """`begins_inside`: the answer begins with what the model thinks, without a marker."""
        self.count = 0
        """Tokens that are certain to be thought."""
        self._form = form
        self._opening = form.opening.partition("*")[0].rstrip()
        self._is_inside = begins_inside
        self._is_open = True
        """Whether further tokens may be thought."""
        self._text = ""
        """The end of the text in which the next marker is searched."""
        self._tokens = 0
        """Tokens of this text that are not counted."""

    def push(self, text: str) -> None:
        """Add the text of the answer's next token."""
        if not self._is_open:
            return
        self._tokens += 1
        self._text += text
        if not self._is_inside:
            self._text = self._text.lstrip()
            if not self._text.startswith(self._opening):
                self._skip()
                return
            self._is_inside, self._text = True, self._text[len(self._opening) :]
        self.count += self._tokens
        self._tokens = 0
        _, closing, after = self._text.partition(self._form.closing)
        if closing:
            self._is_inside, self._is_open, self._text = False, self._form.repeats, after
        else:
            self._text = self._text[-len(self._form.closing) :]

    def _skip(self) -> None:
        """Leave out a text that is not thought, up to where thinking may begin."""
        if self._opening.startswith(self._text):
            return
        self._is_open = self._form.repeats
        kept = next((place for place in range(1, len(self._text)) if self._begins(self._text[place:])), None)
        self._text = "" if kept is None else self._text[kept:]
        self._tokens = 0 if kept is None else 1

    def _begins(self, text: str) -> bool:
        return text.startswith(self._opening) or self._opening.startswith(text)


def with_bounded_thinking(
    request: GenerationRequest, tokenizer: Tokenizer, form: AnswerFormat | None
) -> GenerationRequest:
    """Return the request with the tokens that begin and end thinking, if it has a budget for it.

    `form` is that of the answer to a conversation, `None` for another answer. Without a budget where it has no effect:
    the model does not think, or the answer is no conversation and matches a grammar from its start.
    """
    thinking, reasoning = request.sampling.thinking, tokenizer.reasoning_format
    if thinking is None:
        return request
    if reasoning is None or not reasoning.reasons or (form is None and request.sampling.grammar is not None):
        return replace(request, sampling=replace(request.sampling, thinking=None))
    is_begun = begins_reasoning(tokenizer, reasoning, request.prompt) if form is None else form.begins_in_reasoning
    start = () if is_begun else tokenizer.encode_answer(reasoning.written_opening)
    thinking = replace(thinking, start=start, end=tokenizer.encode_answer(reasoning.closing))
    return replace(request, sampling=replace(request.sampling, thinking=thinking))
