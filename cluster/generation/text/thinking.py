"""The budget of what a model thinks, as the tokens that begin and end its thinking."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.request import GenerationRequest
from cluster.generation.text.prompts import THINKING_END, THINKING_START, begins_thinking
from cluster.generation.text.tokenizer import Tokenizer


def with_bounded_thinking(request: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """Return the request with the tokens that begin and end thinking, if it has a budget for it.

    Without a budget where it has no effect: the model does not think, or the answer matches a grammar from its start.
    """
    thinking = request.sampling.thinking
    if thinking is None:
        return request
    if not tokenizer.reasons or request.sampling.grammar is not None:
        return replace(request, sampling=replace(request.sampling, thinking=None))
    start = () if begins_thinking(tokenizer, request.prompt) else tokenizer.encode_answer(THINKING_START)
    thinking = replace(thinking, start=start, end=tokenizer.encode_answer(THINKING_END))
    return replace(request, sampling=replace(request.sampling, thinking=thinking))
