"""The best candidates of rows of logits by the target's own rule, computed on a shortlist of the most probable tokens.

A candidate's score is its warped logit, plus the noise at its position in sampled rows. Truncation and noise of a whole
vocabulary cost more than a small module's pass, and a token outside the shortlist is hardly ever decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.forward.native.largest import Largest, largest_by_torch
from workers.sampling.context import DecisionContext
from workers.sampling.noise import gumbel, gumbel_of
from workers.sampling.warp import is_unchanged, untruncated
from workers.transfer import row_indices, tensor_on

SHORTLIST = 128
"""Tokens of each row that truncation and noise are computed for: the most probable ones."""


@dataclass(frozen=True, slots=True)
class Leading:
    """The best candidates of rows, best first."""

    scores: Tensor  # [rows, candidates] float32, −inf where there are fewer
    columns: Tensor  # [rows, candidates] columns of the logits
    totals: Tensor  # [rows, 1] logarithm of the sum of all exponentials of scores

    @property
    def confidences(self) -> Tensor:
        """The softmax of the scores, [rows, candidates]; 0 where there are fewer candidates."""
        return (self.scores - self.totals).exp().nan_to_num_(0.0)  # of rows without any candidate, it is NaN


class Shortlist:
    """Finds the best candidates of rows."""

    def __init__(self, vocabulary: Tensor | None, knows_noise: bool, largest: Largest = largest_by_torch) -> None:
        """`vocabulary`, int64 [size], ascending, are the tokens of the logits; `None` means all.

        `knows_noise`: whether the target decides by the shared noise, so that sampled rows are ranked with it.
        `largest` finds the largest logits.
        """
        self._largest = largest
        self.vocabulary = vocabulary
        """The tokens of the logits, int64 [size]; `None` means all."""
        self._knows_noise = knows_noise

    def leading(self, logits: Tensor, contexts: Sequence[DecisionContext], count: int) -> Leading:
        """The best `count` candidates of each row of logits [rows, size]; there is one context per row."""
        if not all(map(is_unchanged, contexts)):
            logits = untruncated(logits, contexts, vocabulary=self.vocabulary)
        count = min(count, logits.shape[1])
        are_greedy = all(context.is_greedy for context in contexts)
        wanted = count if are_greedy else min(max(SHORTLIST, count), logits.shape[1])
        scores, columns, totals = self._largest(logits, wanted)
        if are_greedy:
            return Leading(scores, columns, totals)
        scores = _truncated(scores, totals, contexts)
        if self._knows_noise:
            scores = scores + self._noise(contexts, logits.shape[1], columns.device, columns)
        sampled = tensor_on(logits.device, [[not context.is_greedy] for context in contexts], torch.bool)
        totals = torch.where(sampled, scores.logsumexp(dim=1, keepdim=True), totals)
        scores, places = scores.topk(count)
        return Leading(scores, columns.gather(1, places), totals)

    def tokens(self, columns: Tensor) -> Tensor:
        """The tokens of columns of the logits."""
        return columns if self.vocabulary is None else self.vocabulary[columns]

    def with_noise(self, logits: Tensor, contexts: Sequence[DecisionContext]) -> Tensor:
        """All logits of rows [rows, size], plus the noise in sampled rows, if the target decides by the shared one."""
        if not self._knows_noise or all(context.is_greedy for context in contexts):
            return logits
        return logits + self._noise(contexts, logits.shape[1], logits.device)

    def _noise(
        self, contexts: Sequence[DecisionContext], size: int, device: torch.device, columns: Tensor | None = None
    ) -> Tensor:
        seeds = [context.sampling.seed for context in contexts]
        positions = [context.position for context in contexts]
        if self.vocabulary is None:
            noise = gumbel(seeds, positions, 0, size, device, columns)
        else:
            noise = gumbel_of(seeds, positions, self.vocabulary, device, columns)
        greedy = [row for row, context in enumerate(contexts) if context.is_greedy]
        if greedy:
            noise[row_indices(greedy, noise)] = 0.0
        return noise


def _truncated(scores: Tensor, totals: Tensor, contexts: Sequence[DecisionContext]) -> Tensor:
    """Apply top-k, top-p and min-p to descending scores [rows, shortlist]: −inf for what they exclude."""
    if not any(context.is_truncated for context in contexts):
        return scores
    samplings = [context.sampling if context.is_truncated else None for context in contexts]
    limits = [
        (
            float((one and one.top_k) or scores.shape[1]),
            one.top_p if one else 1.0,
            math.log(one.min_p) if one and one.min_p else -math.inf,
        )
        for one in samplings
    ]
    top_k, top_p, min_p = tensor_on(scores.device, limits, torch.float32).unsqueeze(2).unbind(dim=1)
    scores = scores.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= top_k, -math.inf)
    totals = torch.where(top_k < scores.shape[1], scores.logsumexp(dim=1, keepdim=True), totals)
    probabilities = (scores - totals).exp()
    before = probabilities.cumsum(dim=1) - probabilities
    is_excluded = (before >= top_p) & (top_p < 1.0) | (scores < scores[:, :1] + min_p)
    is_excluded[:, 0] = False
    return scores.masked_fill(is_excluded, -math.inf)
