"""Tokens that a draft model proposes: the best ones by the target's own rule, with the draft's probability of each.

They are ordered by the scores of `decide`, noise included. Where the draft has the target's distribution, the first
candidate is the target's decision, and the second is what the target would decide if the first were impossible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.sampling.context import DecisionContext
from workers.sampling.decide import ScoredRows, score_rows
from workers.sampling.logprobs import keys_in_order
from workers.transfer import HostCopies


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next, with the draft's confidence in it."""

    token: int
    probability: float
    """The softmax of the scores: of warped logits in greedy rows, of warped logits plus noise in sampled rows.

    This is the draft's confidence, not the probability that the target accepts the token."""


def candidates(
    logits: Tensor, contexts: Sequence[DecisionContext], count: int, vocabulary: Tensor | None = None
) -> list[tuple[Candidate, ...]]:
    """The best `count` tokens at each row's position, from logits [n, size]; the best one is what `decide` returns.

    With `vocabulary`, int64 [size], ascending, on their device, the logits are those of its tokens, and no other token
    can be proposed; the tensor must not be changed afterwards. Among equal scores the lowest token comes first. A row
    has fewer candidates where fewer tokens can be chosen, and none if every logit is NaN or −inf. Raises `ValueError`
    unless there is one context per row.
    """
    found: list[tuple[Candidate, ...]] = [()] * len(contexts)
    count, copies = min(count, logits.shape[1]), HostCopies()
    parts = [
        (part.rows, copies.add(_of_part(part, count, vocabulary)))
        for part in score_rows(logits, contexts, vocabulary=vocabulary)
    ]
    for rows, numbers in parts:
        for row, columns in zip(rows, zip(*numbers().tolist(), strict=True), strict=True):
            found[row] = tuple(
                Candidate(int(token), probability)
                for value, token, probability in zip(*columns, strict=True)
                if value > -math.inf
            )
    return found


def _of_part(part: ScoredRows, count: int, vocabulary: Tensor | None) -> Tensor:
    """Scores, tokens and probabilities of the best tokens of each row, best first: float64 [3, rows, count]."""
    values, indices = _leading(part.scores, count)
    probabilities = part.scores.softmax(dim=1).gather(1, indices)
    columns = indices if part.columns is None else part.columns.gather(1, indices)
    tokens = columns if vocabulary is None else vocabulary[columns]
    return torch.stack((values.double(), tokens.double(), probabilities.double()))


def _leading(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their columns; among equal scores, the lowest column first."""
    if scores.is_cuda:  # to look for equal scores would be a wait
        indices = keys_in_order(scores).topk(count, dim=1).indices
        return scores.gather(1, indices), indices
    values, indices = scores.topk(min(count + 1, scores.shape[1]), dim=1)  # one more, to see a tie at the edge
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(dim=1)
    for row in tied.nonzero().squeeze(1).tolist():  # `topk` orders equal values arbitrarily
        order = scores[row].sort(descending=True, stable=True)
        values[row], indices[row] = order.values[: values.shape[1]], order.indices[: values.shape[1]]
    return values[:, :count], indices[:, :count]
