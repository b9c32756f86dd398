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
    drawn. A greedy row has the log-probabilities after penalties, at temperature 1. A row whose logits are all NaN or
    −inf has −inf everywhere. Raises `ValueError` unless there is one context per row.
    """
    log_probabilities = warp(logits, contexts).log_softmax(dim=1)
    return log_probabilities.masked_fill_(log_probabilities.isnan(), -math.inf)
