"""Plain decoding with a model of `transformers` and its KV cache. Only the sampler is Pilotfish's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from cluster.core.request import SamplingParameters
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide


@torch.inference_mode()
def write_alone(
    model: Any,
    prompt: Sequence[int],
    sampling: SamplingParameters,
    count: int,
    allowed: Callable[[Sequence[int]], AllowedTokens | None] = lambda tokens: None,
) -> tuple[int, ...]:
    """Decode `count` tokens after the prompt, one forward pass each. An answer with a grammar ends with a stop token.

    `allowed` is what the grammar allows after the tokens so far, prompt included.
    """
    tokens = list(prompt)
    cache, fresh = None, tokens
    for _ in range(count):
        output = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        context = DecisionContext(sampling, tuple(tokens), len(prompt), allowed(tokens))
        fresh = decide(output.logits[0, -1:], [context])
        tokens.extend(fresh)
        if sampling.grammar is not None and fresh[0] in sampling.end_token_ids:
            break
    return tuple(tokens[len(prompt) :])


def greedy_texts(
    model: Any, prompts: Sequence[Sequence[int]], most_tokens: int, stops: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """What a decoder-only model of `transformers` writes after each prompt, with the stop token that ends a text."""
    texts = []
    for prompt in prompts:
        text = list(prompt)
        with torch.inference_mode():
            while len(text) < len(prompt) + most_tokens and (len(text) == len(prompt) or text[-1] not in stops):
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        texts.append(tuple(text[len(prompt) :]))
    return texts
