"""The target's token at a position: argmax of warped logits plus the position's own noise.

This is the Gumbel-max trick, so each token is an exact sample from its warped distribution; and since
the noise belongs to (seed, position, token), so does the decision, whoever asked for it and when.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from workers.sampling.context import GREEDY_BELOW, DecisionContext
from workers.sampling.device_copy import row_indices
from workers.sampling.noise import gumbel, gumbel_of
from workers.sampling.shortlist import shortlists
from workers.sampling.truncate import truncate
from workers.sampling.warp import untruncated

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


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What decisions are taken by, in some rows."""

    rows: Sequence[int]
    """Indices into the logits."""
    scores: Tensor
    """float32 [rows, k]: warped logits, plus noise in the rows that are drawn; −inf for what cannot be chosen."""
    columns: Tensor | None = None
    """int64 [rows, k], rising: where in the logits those are of which there is a score; `None`: all of them."""


def scored(
    logits: Tensor, contexts: Sequence[DecisionContext], offset: int = 0, vocabulary: Tensor | None = None
) -> Iterator[Scored]:
    """The scores of all rows, a few at a time, in any order. Arguments and errors are those of `warp`."""
    if len(contexts) != logits.shape[0]:
        raise ValueError(f"{len(contexts)} contexts for {logits.shape[0]} rows of logits")
    rows = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 25) // max(1, logits.shape[1]))
    for first in range(0, len(contexts), rows):
        part = slice(first, first + rows)
        yield from _scored_part(logits[part].detach(), contexts[part], first, offset, vocabulary)


def _scored_part(
    logits: Tensor, contexts: Sequence[DecisionContext], first: int, offset: int, vocabulary: Tensor | None
) -> Iterator[Scored]:
    """Of rows that begin with the row `first`."""

    def noise(rows: Sequence[int], columns: Tensor | None = None) -> Tensor:
        seeds, positions = zip(*((contexts[row].sampling.seed, contexts[row].position) for row in rows), strict=True)
        if vocabulary is None:
            return gumbel(seeds, positions, offset, logits.shape[1], logits.device, columns)
        return gumbel_of(seeds, positions, vocabulary, logits.device, columns)

    moved = untruncated(logits, contexts, offset, vocabulary)
    rest = list(range(len(contexts)))
    truncated = [(row, contexts[row].sampling) for row in rest if contexts[row].is_truncated]
    if truncated and not logits.is_cuda:  # which has more time for the whole than the host to ask how much is kept
        short, truncated = shortlists(moved, truncated)
        for listed in short:
            scores = noise(listed.rows, listed.columns).add_(listed.logits)
            yield Scored([first + row for row in listed.rows], scores, listed.columns)
        settled = {row for listed in short for row in listed.rows}
        rest = [row for row in rest if row not in settled]
    if not rest:
        return
    truncate(moved, truncated)
    scores = moved if len(rest) == len(contexts) else moved[row_indices(rest, moved)]
    drawn = [index for index, row in enumerate(rest) if not contexts[row].is_greedy]
    if drawn:
        drawn_noise = noise([rest[index] for index in drawn])
        if len(drawn) == len(rest):
            scores = drawn_noise.add_(scores)
        else:
            scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
            scores[row_indices(drawn, scores)] += drawn_noise
    is_whole = len(rest) == len(contexts)
    yield Scored(range(first, first + len(rest)) if is_whole else [first + row for row in rest], scores)


def _winners(logits: Tensor, contexts: Sequence[DecisionContext], offset: int) -> tuple[Tensor, Tensor]:
    values = torch.empty(len(contexts), device=logits.device)
    ids = torch.empty(len(contexts), dtype=torch.int64, device=logits.device)
    for part in scored(logits, contexts, offset):
        best = part.scores.max(dim=1)  # the first among equals
        columns = best.indices if part.columns is None else part.columns.gather(1, best.indices[:, None]).squeeze(1)
        rows = part.rows
        where = slice(rows.start, rows.stop) if isinstance(rows, range) else row_indices(rows, logits)
        values[where], ids[where] = best.values, columns
    return values, ids + offset
