"""What the model itself thought of a token: log-probabilities before any warping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.core.types import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Reported for an impossible token, since JSON has no −inf (OpenAI's API does the same)."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """The log-probability of each row's token and of its `counts[i]` most probable tokens.

    `logits` [n, vocab] are the model's own, over the whole vocabulary. Natural logarithms, computed in
    float64; equal ones are ordered by token. Raises `ValueError` for arguments of unequal length or a
    token outside the vocabulary.
    """
    if not logits.shape[0] == len(tokens) == len(counts):
        raise ValueError(f"{logits.shape[0]} rows of logits, {len(tokens)} tokens and {len(counts)} counts")
    return tuple(_row_logprobs(row, token, count) for row, token, count in zip(logits, tokens, counts, strict=True))


def _row_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """One row [vocab]; alone, so that its sum is rounded the same way in every batch."""
    vocabulary = logits.shape[0]
    if not 0 <= token < vocabulary:
        raise ValueError(f"token {token} is outside the vocabulary of {vocabulary}")
    clean = logits.detach().double().nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
    normalizer = float(clean.logsumexp(dim=0))
    top = _leading_tokens(clean, min(count, vocabulary))
    values: list[float] = clean[[token, *top]].tolist()
    own, *others = (max(min(value - normalizer, 0.0), LEAST_LOGPROB) for value in values)
    return TokenLogprobs(token, own, tuple(zip(top, others, strict=True)))


def _leading_tokens(logits: Tensor, count: int) -> list[int]:
    """The `count` most probable tokens, most probable first, the lower first among equals."""
    if count <= 0:
        return []
    least = logits.topk(count).values[-1]
    candidates = (logits >= least).nonzero().squeeze(1)  # in order of token
    order = logits[candidates].sort(descending=True, stable=True).indices
    leading: list[int] = candidates[order[:count]].tolist()
    return leading
