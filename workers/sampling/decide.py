"""The sampler: a token is the argmax of warped logits plus Gumbel noise.

By the Gumbel-max trick each token is an exact sample from its warped distribution. The noise depends on
(seed, position, token) alone, so the decision does not depend on the batch, on drafts or on the time of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from workers.sampling.context import DecisionContext, is_truncated, leaders_of, rows_of_contexts
from workers.sampling.decision_table import MOST_COLUMNS, table_of
from workers.sampling.noise import gumbel, gumbel_of
from workers.sampling.parts import Parts, truncated_winners
from workers.sampling.shortlist import shortlists
from workers.sampling.truncate import truncate
from workers.sampling.warp import untruncated
from workers.sampling.winners import DecisionKernels, winners
from workers.transfer import HostCopies, row_indices

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Logits processed at a time. The limit bounds temporary copies, and on a CPU keeps them in cache."""
_UNDECIDABLE = -1


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedTokens:
    """Decisions that a device may still compute."""

    read: Callable[[], list[int]]
    """Returns the tokens; -1 for a row in which every logit is NaN or −inf. The host may wait for the device."""
    on_device: Tensor | None = None
    """The tokens, int64 [n], on the device of the logits; `None` on a CPU."""


def decide(logits: Tensor, contexts: Sequence[DecisionContext], kernels: DecisionKernels | None = None) -> list[int]:
    """Decide the token at each row's position, from logits [n, vocab]; -1 where every logit is NaN or −inf.

    Among equal scores the lowest token wins. Without `kernels`, those of the logits' device decide, if it has some
    (`kernels_for`). Raises `ValueError` unless there is one context per row.
    """
    return launch(logits, contexts, HostCopies(), kernels).read()


def launch(
    logits: Tensor, contexts: Sequence[DecisionContext], copies: HostCopies, kernels: DecisionKernels | None = None
) -> LaunchedTokens:
    """Let the device compute what `decide` returns. The tokens are copied to the host with all other `copies`."""
    if len(contexts) != len(logits):
        raise ValueError(f"{len(contexts)} contexts for {len(logits)} rows of logits")
    if not contexts:
        return LaunchedTokens(list)
    kernels = kernels or kernels_for(logits)
    rows = () if logits.is_cuda or kernels else rows_of_contexts(contexts)
    if rows and all(not any(row.allowed) and leaders_of(row.sampling) for row in rows):
        tokens = largest(logits)
        if tokens is not None and all(one not in of.excluded_tokens for one, of in zip(tokens, contexts, strict=True)):
            return LaunchedTokens(lambda: tokens)
    chosen = _with_unknown(*_winners(logits, contexts, 0, kernels))
    copied = copies.add(chosen)
    return LaunchedTokens(lambda: copied().tolist(), chosen if chosen.is_cuda else None)


def largest(logits: Tensor) -> list[int] | None:
    """The token of the largest logit in each row of logits [n, vocab]; among equal ones the lowest.

    One look takes a tenth of the time of the general way, which copies the logits and changes some. Returns `None` if a
    row needs the general way, because its largest logit is not finite, and for logits that are not float32 on a CPU.
    """
    if logits.is_cuda or logits.dtype is not torch.float32 or not logits.numel():
        return None
    values = logits.detach().numpy()
    tokens = values.argmax(axis=1)  # the first among equals, and the first NaN if there is one
    if not np.isfinite(values[np.arange(len(tokens)), tokens]).all():
        return None
    return cast("list[int]", tokens.tolist())


def is_shardable(sampling: SamplingParameters) -> bool:
    """Whether ranks decide by the best token of each vocabulary shard, without gathering the logits of all.

    False for reported log-probabilities, which need the whole distribution.
    """
    return sampling.logprobs is None


def shard_winners(
    logits: Tensor,
    contexts: Sequence[DecisionContext],
    offset: int,
    parts: Parts | None = None,
    kernels: DecisionKernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the best score and its token in the shard `offset … offset + shard - 1`, from logits [n, shard].

    Returns scores, float32 [n], and tokens, int64 [n]. A row without any candidate has the score −inf. Rows with top-k,
    top-p or min-p need `parts`, with which all ranks call this together. `kernels` are as for `decide`. Raises
    `ValueError` for a row that is not shardable, or needs `parts`.
    """
    for row, context in enumerate(rows_of_contexts(contexts)):
        if not is_shardable(context.sampling):
            raise ValueError(f"row {row}: its sampling parameters need the whole vocabulary, not a shard")
        if parts is None and is_truncated(context.sampling):
            raise ValueError(f"row {row}: its sampling parameters need what the other shards find")
    if kernels is None and (parts is None or parts.vocabulary <= MOST_COLUMNS):
        kernels = kernels_for(logits)
    if kernels is not None or parts is None:
        return _winners(logits, contexts, offset, kernels, parts)
    truncated = [row for row, context in enumerate(contexts) if context.is_truncated]
    return _winners_of_parts(logits, contexts, truncated, offset, parts)


def _winners_of_parts(
    logits: Tensor, contexts: Sequence[DecisionContext], truncated: Sequence[int], offset: int, parts: Parts
) -> tuple[Tensor, Tensor]:
    """The best score of each row, float32 [n], and its token, int64 [n], of which these rows are truncated."""
    others = sorted(set(range(len(contexts))) - set(truncated))
    values = torch.empty(len(contexts), device=logits.device)
    ids = torch.empty(len(contexts), dtype=torch.int64, device=logits.device)
    if others:
        where = row_indices(others, logits)
        values[where], ids[where] = _winners(logits[where], [contexts[row] for row in others], offset, None)
    if truncated:
        where = row_indices(truncated, logits)
        chosen = [contexts[row] for row in truncated]
        values[where], ids[where] = truncated_winners(logits[where], chosen, offset, parts)
    return values, ids


def merge_winners(values: Tensor, ids: Tensor) -> Tensor:
    """Merge the shards' best scores and tokens, [ranks, n] each, into one token per row: int64 [n].

    The largest score wins; among equal scores, the lowest token. A row without any candidate has -1.
    """
    best = values.amax(dim=0)
    return _with_unknown(best, ids.masked_fill(values != best, torch.iinfo(torch.int64).max).amin(dim=0))


def _with_unknown(best: Tensor, ids: Tensor) -> Tensor:
    """The tokens of rows `[n]`, with -1 where their scores `[n]` are −inf."""
    return ids.masked_fill(best == -math.inf, _UNDECIDABLE)


def kernels_for(logits: Tensor) -> DecisionKernels | None:
    """The Triton kernels, on an NVIDIA GPU where the package `triton` is installed; else `None`."""
    if not logits.is_cuda or logits.shape[1] > MOST_COLUMNS or not has_triton():
        return None
    from workers.sampling.triton.winners import TritonDecisions

    return TritonDecisions()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the package `triton` is installed."""
    return find_spec("triton") is not None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Scores of some rows of logits. The token with the largest score is the decision."""

    rows: Sequence[int]
    """Indices into the logits."""
    scores: Tensor
    """float32 [rows, k]: warped logits, plus noise in sampled rows; −inf for tokens that cannot be chosen."""
    columns: Tensor | None = None
    """int64 [rows, k], ascending: the columns of the logits that have a score. `None` means all columns."""


def score_rows(
    logits: Tensor, contexts: Sequence[DecisionContext], offset: int = 0, vocabulary: Tensor | None = None
) -> Iterator[ScoredRows]:
    """Yield the scores of all rows, a few rows at a time, in any order. Arguments and errors are those of `warp`."""
    if len(contexts) != logits.shape[0]:
        raise ValueError(f"{len(contexts)} contexts for {logits.shape[0]} rows of logits")
    rows = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 25) // max(1, logits.shape[1]))
    for first in range(0, len(contexts), rows):
        part = slice(first, first + rows)
        yield from _score_part(logits[part].detach(), contexts[part], first, offset, vocabulary)


def _score_part(
    logits: Tensor, contexts: Sequence[DecisionContext], first: int, offset: int, vocabulary: Tensor | None
) -> Iterator[ScoredRows]:
    """Score consecutive rows, the first of which is row `first` of all logits."""

    def noise(rows: Sequence[int], columns: Tensor | None = None) -> Tensor:
        seeds, positions = zip(*((contexts[row].sampling.seed, contexts[row].position) for row in rows), strict=True)
        if vocabulary is None:
            return gumbel(seeds, positions, offset, logits.shape[1], logits.device, columns)
        return gumbel_of(seeds, positions, vocabulary, logits.device, columns)

    warped = untruncated(logits, contexts, offset, vocabulary)
    remaining = list(range(len(contexts)))
    truncated = [(row, contexts[row].sampling) for row in remaining if contexts[row].is_truncated]
    if truncated and not logits.is_cuda:  # on a GPU, waiting for the kept tokens costs more
        short, truncated = shortlists(warped, truncated)
        for listed in short:
            scores = noise(listed.rows, listed.columns).add_(listed.logits)
            yield ScoredRows([first + row for row in listed.rows], scores, listed.columns)
        done = {row for listed in short for row in listed.rows}
        remaining = [row for row in remaining if row not in done]
    if not remaining:
        return
    truncate(warped, truncated)
    scores = warped if len(remaining) == len(contexts) else warped[row_indices(remaining, warped)]
    drawn = [index for index, row in enumerate(remaining) if not contexts[row].is_greedy]
    if drawn:
        drawn_noise = noise([remaining[index] for index in drawn])
        if len(drawn) == len(remaining):
            scores = drawn_noise.add_(scores)
        else:
            scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
            scores[row_indices(drawn, scores)] += drawn_noise
    is_whole = len(remaining) == len(contexts)
    yield ScoredRows(range(first, first + len(remaining)) if is_whole else [first + row for row in remaining], scores)


def _winners(
    logits: Tensor,
    contexts: Sequence[DecisionContext],
    offset: int,
    kernels: DecisionKernels | None,
    parts: Parts | None = None,
) -> tuple[Tensor, Tensor]:
    """The best score of each row, float32 [n], and its token, int64 [n]. Only `kernels` truncate rows by `parts`."""
    if kernels is not None and len(contexts):
        vocabulary = None if parts is None else parts.vocabulary
        table = table_of(contexts, offset, logits.shape[1], vocabulary)
        return winners(kernels, logits.detach(), table, offset, parts)
    contexts = list(contexts)  # each is read more than once
    values = torch.empty(len(contexts), device=logits.device)
    ids = torch.empty(len(contexts), dtype=torch.int64, device=logits.device)
    for part in score_rows(logits, contexts, offset):
        best = part.scores.max(dim=1)  # the first among equals
        columns = best.indices if part.columns is None else part.columns.gather(1, best.indices[:, None]).squeeze(1)
        rows = part.rows
        where = slice(rows.start, rows.stop) if isinstance(rows, range) else row_indices(rows, logits)
        values[where], ids[where] = best.values, columns
    return values, ids + offset
