"""How many of the largest logits decide a token, so that a kernel need not compute the others."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core.request import SamplingParameters
from workers.sampling.context import GREEDY_BELOW


def leaders_of(sampling: SamplingParameters) -> int:
    """Among this many of the largest logits is the one that is chosen; 0 where the others matter too.

    A greedy token has the largest logit of those that are not excluded. Whatever changes logits, draws, or reports
    probabilities needs them all.
    """
    if sampling.temperature >= GREEDY_BELOW or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        return 0
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        return 0
    if sampling.logit_bias or sampling.allowed_token_ids or sampling.grammar or sampling.thinking:
        return 0
    if sampling.no_repeat_ngram_size:
        return 0  # it may exclude any number of tokens
    ends = len(sampling.end_token_ids) if sampling.min_tokens else 0
    return 1 + ends + len(sampling.bad_words)


def common_leaders(samplings: Iterable[SamplingParameters]) -> int:
    """The number for several positions together; 0 if one of them needs all logits."""
    needed = [leaders_of(sampling) for sampling in samplings]
    return max(needed) if needed and all(needed) else 0
