"""Draws drafted tokens at random from a draft model's truncated distribution, and states the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cluster.core.drafting import DraftDistribution
from workers.draft.common.trees.expander import ExpansionRow
from workers.draft.model.model_expander import ModelExpander
from workers.kv.pool import KvPool
from workers.sampling.context import DecisionContext
from workers.sampling.noise import gumbel
from workers.sampling.uniform import random_bits
from workers.sampling.warp import warp
from workers.transfer import lists_together, row_indices

MOST_TOKENS = 64
"""Most tokens of a stated distribution: the most probable ones, from which the draft is then drawn."""


@dataclass(frozen=True, slots=True)
class DrawnSiblings:
    """Tokens that may come next, in the order in which they were drawn."""

    tokens: tuple[int, ...] = ()
    distribution: DraftDistribution | None = None
    """What they were drawn from without replacement; `None` if they are the most probable tokens, in greedy rows."""


class TokenDrawer:
    """Runs a draft model and draws tokens after each row.

    The random numbers depend on the sequence's seed, on the length of its committed tokens and on the position, so they
    are new in each round. Tokens from `target_vocabulary_size` on are never drawn.
    """

    def __init__(self, expander: ModelExpander, target_vocabulary_size: int | None = None) -> None:
        self._expander = expander
        vocabulary, size = expander.vocabulary, expander.vocabulary_size
        limit = min(size, target_vocabulary_size or size)
        self._columns = limit if vocabulary is None else int((vocabulary < limit).sum())
        self._vocabulary = None if vocabulary is None else vocabulary[: self._columns]

    @property
    def memory(self) -> KvPool:
        return self._expander.memory

    @property
    def max_context_len(self) -> int:
        return self._expander.max_context_len

    @property
    def vocabulary_size(self) -> int:
        """All tokens are below this value."""
        return self._expander.vocabulary_size

    def draw(self, rows: Sequence[ExpansionRow], count: int) -> list[DrawnSiblings]:
        """Run one forward pass: commit each row's tokens to its table, and draw up to `count` tokens after them.

        Returns one entry per row, empty where `is_last` is false or no token can be drawn. No two rows share a table.
        """
        logits, contexts = self._expander.compute(rows)
        depths = [row.depth for row in rows if row.is_last]
        found = iter(self._siblings(logits[:, : self._columns], contexts, depths, count) if contexts else ())
        return [next(found) if row.is_last else DrawnSiblings() for row in rows]

    def _siblings(
        self, logits: Tensor, contexts: Sequence[DecisionContext], depths: Sequence[int], count: int
    ) -> list[DrawnSiblings]:
        warped = warp(logits, contexts, vocabulary=self._vocabulary)
        values, columns = warped.topk(min(MOST_TOKENS, self._columns), dim=1)  # [rows, kept]
        tokens = columns if self._vocabulary is None else self._vocabulary[columns]
        seeds = [
            random_bits(b"draft", context.sampling.seed, context.position - depth + 1)
            for context, depth in zip(contexts, depths, strict=True)
        ]
        positions = [context.position for context in contexts]
        noise = gumbel(seeds, positions, 0, self._columns, logits.device, columns)
        noise[row_indices([row for row, context in enumerate(contexts) if context.is_greedy], noise)] = 0.0
        # By Gumbel-top-k, the best sums are draws without replacement, in order.
        orders = (values + noise).sort(dim=1, descending=True, stable=True).indices[:, :count]
        probabilities = values.softmax(dim=1)
        numbers = lists_together([values, tokens, probabilities, orders])
        return [_row_siblings(*row) for row in zip(*numbers, contexts, strict=True)]


def _row_siblings(
    values: list[float], tokens: list[int], probabilities: list[float], order: list[int], context: DecisionContext
) -> DrawnSiblings:
    """The siblings of one row, from `values`, `tokens` and `probabilities` [kept] and the `order` [count] of draws."""
    possible = [index for index, value in enumerate(values) if value > -math.inf and probabilities[index] > 0.0]
    drawn = tuple(tokens[index] for index in order if index in possible)
    if context.is_greedy or not drawn:
        return DrawnSiblings(drawn)
    kept = np.array([probabilities[index] for index in possible])
    stated = (kept / kept.sum()).astype(np.float32)  # as a message has them: the rows that bring the draft are equal
    return DrawnSiblings(drawn, DraftDistribution(tuple(tokens[index] for index in possible), tuple(stated.tolist())))
