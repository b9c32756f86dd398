"""top-k, top-p and min-p over whole rows of logits, and the probability masses that top-p counts.

Masses are integers, so sums over the vocabulary do not depend on their order. The same tokens are kept on every device
and in every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from workers.transfer import row_indices, tensor_on

_CANDIDATES = 1024
"""Most probable tokens that are examined first for top-p. More are examined only if these do not reach its mass."""
_ALL_MASS = 1 << 62
UNIT_BITS = 40
"""Probabilities relative to the largest are integers in units of 2⁻⁴⁰, so that 2²⁰ of them sum to less than 2⁶³."""
_LN2 = 0.6931471805599453
_EXPONENTIAL_SERIES = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


def truncate(logits: Tensor, rows: Sequence[tuple[int, SamplingParameters]]) -> None:
    """Set the logits that top-k, top-p and then min-p exclude to −inf, in place, in these rows of float32 [n, size]."""
    _on_rows(
        logits, [(row, sampling) for row, sampling in rows if sampling.top_k or sampling.top_p < 1.0], _keep_leading
    )
    _on_rows(logits, [(row, sampling) for row, sampling in rows if sampling.min_p], _drop_unlikely)


def _on_rows(
    logits: Tensor,
    rows: Sequence[tuple[int, SamplingParameters]],
    change: Callable[[Tensor, Sequence[SamplingParameters]], None],
) -> None:
    """Apply `change`, which works in place, to these rows alone. A step that only reads prompts has no rows."""
    samplings = [sampling for _, sampling in rows]
    if not rows:
        return
    if len(rows) == logits.shape[0]:
        change(logits, samplings)
    else:
        indices = row_indices([row for row, _ in rows], logits)
        part = logits[indices]
        change(part, samplings)
        logits[indices] = part


def _drop_unlikely(logits: Tensor, samplings: Sequence[SamplingParameters]) -> None:
    """min-p, in place. The condition p < min_p · p_best is a bound on the distance between two logits."""
    gaps = tensor_on(logits.device, [math.log(sampling.min_p) for sampling in samplings], logits.dtype).unsqueeze(1)
    logits.masked_fill_(logits < logits.amax(dim=1, keepdim=True) + gaps, -math.inf)


def _keep_leading(logits: Tensor, samplings: Sequence[SamplingParameters], candidates: int = _CANDIDATES) -> None:
    """top-k and top-p, in place. Both keep the first tokens in the order of descending logit, then ascending token.

    Examines the first `candidates` tokens, and more only in rows that may keep more.
    """
    vocabulary = logits.shape[1]
    limits = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    candidates = min(max([candidates, *(limit for limit in limits if limit < vocabulary)]), vocabulary)
    leaders = logits.topk(candidates, dim=1).values  # [n, candidates], falling
    counts = _leading_counts(logits, leaders, limits, [sampling.top_p for sampling in samplings])
    wide: list[int] = []
    if max(limits) > candidates:  # only then may a row keep more, and only then wait for the device
        wide = [row for row, count in enumerate(counts.squeeze(1).tolist()) if count > candidates]
    if wide:
        indices = row_indices(wide, logits)
        part = logits[indices]
        _keep_leading(part, [samplings[row] for row in wide], candidates * 8)
    _keep_counted(logits, leaders, counts.clamp(max=candidates))
    if wide:
        logits[indices] = part


def _leading_counts(logits: Tensor, leaders: Tensor, limits: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """How many leading tokens each row keeps: int64 [n, 1]. A count above `candidates` means that more are needed.

    `leaders` [n, candidates] are the largest logits in descending order. `limits` are the counts that top-k keeps.
    top-p is a share of the mass within top-k.
    """
    candidates = leaders.shape[1]
    limit = tensor_on(logits.device, limits, torch.int64).unsqueeze(1)  # [n, 1]
    if all(share >= 1.0 for share in top_p):
        return limit
    best = leaders[:, :1].clamp(min=torch.finfo(torch.float32).min)  # −inf minus −inf would be NaN
    masses = relative_masses(leaders - best).cumsum(dim=1)  # int64 [n, candidates]
    total = masses.gather(1, limit.clamp(max=candidates) - 1)
    if max(limits) > candidates:
        everything = total_masses(logits - best)
        total = torch.where(limit > candidates, everything, total)
    return counts_to_reach(masses, total, top_p).minimum(limit)


def counts_to_reach(masses: Tensor, total: Tensor, top_p: Sequence[float]) -> Tensor:
    """How many of the leading tokens top-p keeps: int64 [n, 1]. The count is above `k` if `k` do not reach its share.

    `masses` [n, k] are the cumulative masses of the leading tokens, `total` [n, 1] is the mass of all tokens.
    """
    # The tokens before the wanted mass is reached, and the one that reaches it.
    return (masses < mass_to_reach(total, top_p)).sum(dim=1, keepdim=True) + 1


def mass_to_reach(total: Tensor, top_p: Sequence[float]) -> Tensor:
    """The mass that tokens kept by top-p reach, from that of all tokens: int64 [n, 1]; above it for no top-p."""
    share = tensor_on(total.device, top_p, torch.float64).unsqueeze(1)
    wanted = (total * share).ceil().long().clamp(min=1).minimum(total)
    return torch.where(share < 1.0, wanted, _ALL_MASS)


def _keep_counted(logits: Tensor, leaders: Tensor, counts: Tensor) -> None:
    """Set all but the `counts` [n, 1] leading tokens to −inf, in place."""
    edge = leaders.gather(1, counts - 1)  # [n, 1]: the smallest logit that is kept
    ties_kept = counts - (leaders > edge).sum(dim=1, keepdim=True)
    kept = logits >= edge
    at_edge = logits == edge
    if logits.is_cuda or bool((at_edge.sum(dim=1, keepdim=True) > ties_kept).any()):
        kept &= ~at_edge | (at_edge.cumsum(dim=1) <= ties_kept)
    logits.masked_fill_(~kept, -math.inf)


def relative_masses(gaps: Tensor) -> Tensor:
    """e^gap in units of 2⁻⁴⁰, for gaps ≤ 0: int64, the same bits on every device.

    Computed by exactly rounded operations and converted to integers, so that sums do not depend on their order.
    """
    exponent = (gaps * (1.0 / _LN2)).clamp_(min=-64.0)  # e^gap = 2^exponent
    whole = exponent.round()
    remainder = exponent.sub_(whole).mul_(_LN2)  # between −0.35 and 0.35
    series = torch.full_like(remainder, _EXPONENTIAL_SERIES[0])
    for coefficient in _EXPONENTIAL_SERIES[1:]:
        series.mul_(remainder).add_(coefficient)  # two kernels: nothing is fused
    exponents = whole.to(torch.int32).add_(127 + UNIT_BITS).bitwise_left_shift_(23)
    return series.mul_(exponents.view(torch.float32)).long()


def total_masses(gaps: Tensor) -> Tensor:
    """The sums of `relative_masses` over gaps [n, size]: int64 [n, 1]."""
    if gaps.is_cuda:
        return relative_masses(gaps).sum(dim=1, keepdim=True)
    # Row by row, so that intermediate results stay in cache.
    return torch.cat([relative_masses(row).sum(dim=0, keepdim=True) for row in gaps]).unsqueeze(1)
