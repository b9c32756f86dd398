"""Reported log-probabilities: those of the model itself, before penalties, temperature and truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.core.request import TokenLogprobs
from workers.transfer import tensor_on

LEAST_LOGPROB = -9999.0
"""Reported for an impossible token, because JSON has no −inf. OpenAI's API reports the same number."""


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], listed: Sequence[int] = ()
) -> tuple[TokenLogprobs, ...]:
    """The log-probability of each row's token, and those of its `counts[i]` most probable tokens.

    If there are `listed` tokens, they are reported instead of the most probable ones, most probable first. `logits`
    [n, vocab] are the model's, over the whole vocabulary. Log-probabilities are natural logarithms, computed in
    float64. Tokens of equal probability are ordered by token. Raises `ValueError` for arguments of unequal length or a
    token outside the vocabulary.
    """
    if not logits.shape[0] == len(tokens) == len(counts):
        raise ValueError(f"{logits.shape[0]} rows of logits, {len(tokens)} tokens and {len(counts)} counts")
    vocabulary = logits.shape[1]
    for token in (*tokens, *listed):
        if not 0 <= token < vocabulary:
            raise ValueError(f"token {token} is outside the vocabulary of {vocabulary}")
    kept = [len(listed) if listed else max(0, min(count, vocabulary)) for count in counts]
    named = tensor_on(logits.device, listed, torch.int64)
    parts = [_row_numbers(row, token, count, named) for row, token, count in zip(logits, tokens, kept, strict=True)]
    if not parts:
        return ()
    numbers: list[float] = torch.cat(parts).tolist()  # the only wait for the device
    found: list[TokenLogprobs] = []
    for token, count in zip(tokens, kept, strict=True):
        top, (rank, normalizer, *values) = numbers[:count], numbers[count : 2 * count + 3]
        numbers = numbers[2 * count + 3 :]
        own, *others = (_logprob(value, normalizer) for value in values)
        found.append(TokenLogprobs(token, own, tuple(zip(map(int, top), others, strict=True)), int(rank)))
    return tuple(found)


def _logprob(logit: float, normalizer: float) -> float:
    """A log-probability that JSON has a number for, also in a row without any finite logit."""
    found = logit - normalizer  # NaN where both are −inf
    return min(found, 0.0) if found > LEAST_LOGPROB else LEAST_LOGPROB


def _row_numbers(logits: Tensor, token: int, count: int, listed: Tensor) -> Tensor:
    """Numbers of one row of logits [vocab], as float64 [2 · count + 3], which is exact for any token.

    In this order: the `count` reported tokens, the rank of `token`, the log of the row's sum, the logit of `token`, the
    logits of the reported tokens. These are the `listed` ones, int64, or the most probable ones. The row is computed
    alone, so that its sum is rounded the same way in every batch.
    """
    clean = logits.detach().double().nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
    top = (
        listed[clean[listed].sort(descending=True, stable=True).indices]
        if len(listed)
        else _leading_tokens(clean, count)
    )
    own = clean[token : token + 1]
    rank = 1 + (clean > own).sum() + (clean[:token] == own).sum()
    return torch.cat((top.double(), rank.double()[None], clean.logsumexp(dim=0)[None], own, clean[top]))


def _leading_tokens(logits: Tensor, count: int) -> Tensor:
    """The `count` most probable tokens, int64 [count]: the most probable first, the lowest first among equals."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if logits.is_cuda:  # on a GPU, sorting all logits is faster than waiting for the number of candidates
        return logits.sort(descending=True, stable=True).indices[:count]
    least = logits.topk(count).values[-1]
    candidates = (logits >= least).nonzero().squeeze(1)  # in order of token
    order = logits[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]
