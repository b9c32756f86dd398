"""Batches for drafting modules: tokens, the target's hidden states, and the target's distribution of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from workers.distill.answers import Answer
from workers.distill.examples import most_alternatives, weights_of, write_leading
from workers.model.drafting.ends import TargetEnds


class TapSource(Protocol):
    """Where the hidden states of answers come from; `TapCache` says what they are."""

    @property
    def width(self) -> int:
        """Values of the hidden states of one token, taps x hidden size."""

    def has(self, answer: Answer) -> bool:
        """Whether the hidden states of exactly these tokens are known."""

    def of(self, answer: Answer) -> Tensor:
        """The hidden states [tokens, width] of prompt and answer."""


@dataclass(frozen=True, slots=True)
class TapBatch:
    """Rows of prompt and answer, padded on the right."""

    tokens: Tensor
    """[rows, length] int64, padded with 0."""
    lengths: Tensor
    """[rows] Tokens of each row."""
    taps: Tensor
    """[rows, length, taps x hidden size] bfloat16, padded with 0."""
    first: Tensor
    """[rows] Position of the first token that a draft can predict: the second token of the answer."""
    leading: Tensor
    """[rows, length, alternatives] The target's most probable tokens at each position as rows of the head; -1 where
    unknown."""
    log_probabilities: Tensor
    """[rows, length, alternatives] Their log-probabilities, float32; -inf where unknown."""
    weights: Tensor | None = None
    """[rows, length] Weights of the losses of the tokens, float32; `None`: all are 1."""

    @property
    def drafted(self) -> Tensor:
        """[rows, length] Whether a draft can predict the token at this position."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (places >= self.first.unsqueeze(1)) & (places < self.lengths.unsqueeze(1))


def tap_batch(answers: Sequence[Answer], cache: TapSource, ends: TargetEnds, max_length: int) -> TapBatch:
    """A batch of answers, each cut to `max_length` tokens from its beginning."""
    device = ends.head.device
    rows = [(*answer.prompt, *answer.answer)[:max_length] for answer in answers]
    length = max(len(row) for row in rows)
    alternatives = most_alternatives(answers)
    tokens = torch.zeros((len(rows), length), dtype=torch.long)
    taps = torch.zeros((len(rows), length, cache.width), dtype=torch.bfloat16)
    ids = np.full((len(rows), length, alternatives), -1, np.int64)
    log_probabilities = np.full((len(rows), length, alternatives), -np.inf, np.float32)
    weights = torch.ones((len(rows), length))
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        weights[number, : len(row)] = weights_of(answer, len(row))
        tokens[number, : len(row)] = torch.tensor(row)
        taps[number, : len(row)] = cache.of(answer)[: len(row)]
        own = slice(len(answer.prompt), len(row))
        write_leading(answer, ids[number, own], log_probabilities[number, own])
    known = torch.from_numpy(ids).to(device)
    return TapBatch(
        tokens.to(device),
        torch.tensor([len(row) for row in rows], device=device),
        taps.to(device),
        torch.tensor([len(answer.prompt) + 1 for answer in answers], device=device),
        ends.row_of[known.clamp(min=0)].masked_fill(known < 0, -1),
        torch.from_numpy(log_probabilities).to(device),
        None if all(answer.weights is None for answer in answers) else weights.to(device),
    )
