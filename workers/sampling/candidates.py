"""What a drafter guesses: the tokens that come first by the target's own rule, and how sure the draft is of each.

The order is that of the scores by which `decide` takes the first, noise included: where the draft's distribution is
the target's, so is the order, and what would have been drawn had the first been impossible comes second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.sampling.context import DecisionContext
from workers.sampling.decide import Scored, scored


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next."""

    token: int
    probability: float
    """The softmax of the scores: of warped logits in greedy rows, of those plus noise in drawn ones.

    That is the draft's own confidence, not the chance that the target takes the token."""


def candidates(
    logits: Tensor, contexts: Sequence[DecisionContext], count: int, vocabulary: Tensor | None = None
) -> list[tuple[Candidate, ...]]:
    """The best `count` tokens at each row's position, from logits [n, size]; the best is what `decide` takes.

    Where `vocabulary`, int64 [size], ascending, is given, the logits are those of its tokens, and no other can be
    guessed; it must not be changed afterwards. Equal scores go to the lower token. A row has fewer candidates where
    no more tokens can be chosen, and none if every logit is NaN or −inf. Raises `ValueError` unless there is one
    context per row.
    """
    found: list[tuple[Candidate, ...]] = [()] * len(contexts)
    count = min(count, logits.shape[1])
    for part in scored(logits, contexts, vocabulary=vocabulary):
        for row, best in zip(part.rows, _of_part(part, count, vocabulary), strict=True):
            found[row] = best
    return found


def _of_part(part: Scored, count: int, vocabulary: Tensor | None) -> Iterator[tuple[Candidate, ...]]:
    values, indices = _leading(part.scores, count)
    probabilities = part.scores.softmax(dim=1).gather(1, indices)
    columns = indices if part.columns is None else part.columns.gather(1, indices)
    tokens = columns if vocabulary is None else vocabulary.to(columns.device)[columns]
    numbers = torch.stack((values.double(), tokens.double(), probabilities.double()))
    for row in zip(*numbers.tolist(), strict=True):  # all that is asked of the device
        yield tuple(
            Candidate(int(token), probability)
            for value, token, probability in zip(*row, strict=True)
            if value > -math.inf
        )


def _leading(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and where they stand, the first among equals first."""
    values, indices = scores.topk(min(count + 1, scores.shape[1]), dim=1)  # one more, to see a tie at the edge
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(dim=1)
    for row in tied.nonzero().squeeze(1).tolist():  # `topk` leaves their order open
        order = scores[row].sort(descending=True, stable=True)
        values[row], indices[row] = order.values[: values.shape[1]], order.indices[: values.shape[1]]
    return values[:, :count], indices[:, :count]
