"""The target's distribution at each position, for acceptance rules that need more than its decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from workers.sampling.context import DecisionContext
from workers.sampling.warp import warp


def log_distribution(logits: Tensor, contexts: Sequence[DecisionContext]) -> Tensor:
    """Log-probabilities of the distribution that each row's token is drawn from, from logits [n, vocab].

    Returns float32 [n, vocab]: after penalties, temperature, top-k, top-p and min-p, −inf for tokens that cannot be
    drawn. A greedy row has 0 for its most probable token (the lowest among equals) and −inf for all others. A row
    whose logits are all NaN or −inf has −inf everywhere. Raises `ValueError` unless there is one context per row.
    """
    warped = warp(logits, contexts)
    log_probabilities = warped.log_softmax(dim=1)
    log_probabilities.masked_fill_(log_probabilities.isnan(), -math.inf)
    for row, context in enumerate(contexts):
        if context.is_greedy:
            best = warped[row].argmax()
            is_decidable = warped[row, best] > -math.inf
            log_probabilities[row] = -math.inf
            log_probabilities[row, best] = 0.0 if is_decidable else -math.inf
    return log_probabilities
