"""The target's token at a position: argmax of warped logits plus the position's own noise.

This is the Gumbel-max trick, so each token is an exact sample from its warped distribution; and since
the noise belongs to (seed, position, token), so does the decision, whoever asked for it and when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.core.types import SamplingParameters
from workers.sampling.context import GREEDY_BELOW, DecisionContext
from workers.sampling.noise import gumbel
from workers.sampling.send import places
from workers.sampling.warp import warp

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Logits worked on at a time: bounds the copies, and on a CPU keeps them in cache."""
_HOPELESS = -1


class Undecidable(ValueError):
    """Rows in which no token can be chosen, because every logit is NaN or −inf; `rows` are their indices."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        super().__init__(f"rows {list(rows)}: every logit is NaN or -inf, so no token can be chosen")


def decide(logits: Tensor, contexts: Sequence[DecisionContext]) -> list[int]:
    """The token at each row's position, from logits [n, vocab].

    Equal scores go to the lower token. Raises `Undecidable`, which names the rows, and `ValueError`
    unless there is one context per row.
    """
    values, ids = _winners(logits, contexts, offset=0)
    return merge_winners(values.unsqueeze(0), ids.unsqueeze(0))


def is_shardable(sampling: SamplingParameters) -> bool:
    """Whether a vocabulary shard's winner can be found without the other shards.

    False for what needs the whole distribution: top-k, top-p and min-p (at temperature 0 they change
    nothing), and reported log-probabilities.
    """
    whole = sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p == 0.0
    return sampling.logprobs is None and (whole or sampling.temperature < GREEDY_BELOW)


def shard_winners(logits: Tensor, contexts: Sequence[DecisionContext], offset: int) -> tuple[Tensor, Tensor]:
    """The best score and its token in the shard `offset … offset + shard - 1`, from logits [n, shard].

    Returns float32 [n] and int64 [n]; a row without any candidate has −inf. Raises `ValueError` for a
    row that is not shardable.
    """
    for row, context in enumerate(contexts):
        if not is_shardable(context.sampling):
            raise ValueError(f"row {row}: its sampling parameters need the whole vocabulary, not a shard")
    return _winners(logits, contexts, offset)


def merge_winners(values: Tensor, ids: Tensor) -> list[int]:
    """The shards' winners [ranks, n] to one token per row: the largest score, the lowest token among equals.

    Raises `Undecidable`, which names the rows.
    """
    best = values.amax(dim=0)
    tokens = ids.masked_fill(values != best, torch.iinfo(torch.int64).max).amin(dim=0)
    chosen: list[int] = tokens.masked_fill(best == -math.inf, _HOPELESS).tolist()  # all that is asked of the device
    hopeless = tuple(row for row, token in enumerate(chosen) if token == _HOPELESS)
    if hopeless:
        raise Undecidable(hopeless)
    return chosen


def _winners(logits: Tensor, contexts: Sequence[DecisionContext], offset: int) -> tuple[Tensor, Tensor]:
    if len(contexts) != logits.shape[0]:
        raise ValueError(f"{len(contexts)} contexts for {logits.shape[0]} rows of logits")
    rows = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 25) // max(1, logits.shape[1]))
    values = torch.empty(len(contexts), device=logits.device)
    ids = torch.empty(len(contexts), dtype=torch.int64, device=logits.device)
    for first in range(0, len(contexts), rows):
        part = slice(first, first + rows)
        scores = _scores(logits[part].detach(), contexts[part], offset)
        torch.max(scores, dim=-1, out=(values[part], ids[part]))  # the first among equals
    return values, ids + offset


def _scores(logits: Tensor, contexts: Sequence[DecisionContext], offset: int) -> Tensor:
    """Warped logits, plus noise in the rows that are drawn: float32 [n, size]."""
    warped = warp(logits, contexts, offset)
    drawn = [row for row, context in enumerate(contexts) if not context.is_greedy]
    if not drawn:
        return warped
    seeds = [contexts[row].sampling.seed for row in drawn]
    positions = [contexts[row].position for row in drawn]
    noise = gumbel(seeds, positions, offset, logits.shape[1], logits.device)
    if len(drawn) == len(contexts):
        return noise.add_(warped)
    scores = warped.clone() if warped.data_ptr() == logits.data_ptr() else warped
    scores[places(drawn, scores)] += noise
    return scores
