"""Finds the tokens that `truncate` keeps from the leading tokens alone, where they are few.

Truncation keeps a few dozen of tens of thousands of tokens. On a CPU, truncating, drawing noise and choosing are
faster on the leading tokens alone. For top-p, the mass of the whole vocabulary is estimated with a known error bound.
It is counted exactly only where the result depends on the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from workers.sampling.truncate import UNIT_BITS, counts_to_reach, relative_masses, total_masses
from workers.transfer import row_indices

_WIDTHS = (128, 1024, 8192)
"""Numbers of leading tokens that are examined. A row that keeps more tokens is tried with the next width."""
_LEAST_SHARE = 4
"""Shortlists are used only where the vocabulary is at least this many times as wide as the list."""
_SLACK = 2e-5
"""Bound of the relative difference between e^gap and its integer mass. The true bound is half of it."""
_SLACK_UNITS = 2
"""Bound of the absolute difference in units, for small masses, which are truncated to whole units."""


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """All tokens that can be drawn in some rows."""

    rows: list[int]
    logits: Tensor
    """float32 [rows, k], −inf for listed tokens that cannot be drawn."""
    columns: Tensor
    """int64 [rows, k], ascending: the columns of these logits."""


def shortlists(
    logits: Tensor, rows: Sequence[tuple[int, SamplingParameters]]
) -> tuple[list[Shortlist], list[tuple[int, SamplingParameters]]]:
    """Shortlists of these rows of float32 [n, size], and the rows that keep too many tokens for a shortlist."""
    found: list[Shortlist] = []
    pending = list(rows)
    for width in _WIDTHS:
        if not pending or width * _LEAST_SHARE > logits.shape[1]:
            break
        indices = [row for row, _ in pending]
        part = logits if indices == list(range(logits.shape[0])) else logits[row_indices(indices, logits)]
        kept, columns, fits = _shorten(part, [sampling for _, sampling in pending], width)
        if all(fits):
            return [*found, Shortlist(indices, kept, columns)], []
        fitting = [index for index, fit in enumerate(fits) if fit]
        if fitting:
            chosen = row_indices(fitting, logits)
            found.append(Shortlist([indices[index] for index in fitting], kept[chosen], columns[chosen]))
        pending = [entry for entry, fit in zip(pending, fits, strict=True) if not fit]
    return found, pending


def _shorten(logits: Tensor, samplings: Sequence[SamplingParameters], width: int) -> tuple[Tensor, Tensor, list[bool]]:
    """Logits and columns [n, width] of the leading tokens, and for each row whether they are all that it keeps."""
    size = logits.shape[1]
    limits = torch.tensor([min(sampling.top_k or size, size) for sampling in samplings]).unsqueeze(1)
    least = torch.tensor([math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings])
    leaders, columns = logits.topk(width, dim=1)  # descending
    threshold = leaders[:, :1] + least.unsqueeze(1)
    last = leaders[:, -1:]
    counts = _counts(logits, leaders, limits, [sampling.top_p for sampling in samplings])
    seen = counts.clamp(max=width)
    edge = leaders.gather(1, seen - 1)
    # Tokens equal to the last one may be outside of the list. That matters only if the last one is kept.
    fits = ((counts < width) & (edge > last)) | (last < threshold)
    fits &= (limits <= width) | (limits == size)
    columns, order = columns.sort(dim=1)
    logits = leaders.gather(1, order)
    ties_kept = seen - (logits > edge).sum(dim=1, keepdim=True)
    at_edge = logits == edge
    kept = (logits > edge) | (at_edge & (at_edge.cumsum(dim=1) <= ties_kept))
    kept &= logits >= threshold
    return logits.masked_fill_(~kept, -math.inf), columns, fits.squeeze(1).tolist()


def _counts(logits: Tensor, leaders: Tensor, limits: Tensor, top_p: Sequence[float]) -> Tensor:
    """How many leading tokens top-k and top-p keep: int64 [n, 1]. A count above k means that more are needed."""
    if all(share >= 1.0 for share in top_p):
        return limits
    best = leaders[:, :1].clamp(min=torch.finfo(torch.float32).min)  # −inf minus −inf would be NaN
    masses = relative_masses(leaders - best).cumsum(dim=1)  # int64 [n, width]
    within = masses.gather(1, limits.clamp(max=masses.shape[1]) - 1)
    is_whole = limits > masses.shape[1]
    if not bool(is_whole.any()):
        return counts_to_reach(masses, within, top_p).minimum(limits)
    estimate = (logits - best).exp_().sum(dim=1, keepdim=True, dtype=torch.float64) * 2.0**UNIT_BITS
    slack = estimate * _SLACK + _SLACK_UNITS * logits.shape[1]
    fewest, most = (
        counts_to_reach(masses, torch.where(is_whole, bound.long(), within), top_p).minimum(limits)
        for bound in ((estimate - slack).clamp(min=0), estimate + slack)
    )
    doubtful = (fewest != most).squeeze(1).nonzero().squeeze(1)
    if len(doubtful):
        total = total_masses(logits[doubtful] - best[doubtful])
        total = torch.where(is_whole[doubtful], total, within[doubtful])
        shares = [top_p[row] for row in doubtful.tolist()]
        fewest[doubtful] = counts_to_reach(masses[doubtful], total, shares).minimum(limits[doubtful])
    return fewest
