"""From the target's logits to the distribution that is sampled.

In this order: repetition penalty; presence and frequency penalties and bias (one sum per token);
temperature; top-k; top-p; min-p. All in float32. A row's result depends on its own logits and context
alone, bit for bit, whatever shares its batch: what is summed over the vocabulary is summed in integers,
the rest is element by element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from cluster.core.types import SamplingParameters
from workers.sampling.context import DecisionContext
from workers.sampling.send import places, send

_LARGEST_LOGIT = 1e30
"""Stands for +inf, so that a difference or quotient of logits is still a number."""
_CANDIDATES = 1024
"""Most probable tokens looked at first for a nucleus; the whole vocabulary only if they do not fill it."""
_ALL_MASS = 1 << 62
_UNIT_BITS = 40
"""Probabilities relative to the largest are counted in units of 2⁻⁴⁰: 2²⁰ of them sum below 2⁶³."""
_LN2 = 0.6931471805599453
_EXPONENTIAL_SERIES = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


def warp(logits: Tensor, contexts: Sequence[DecisionContext], offset: int = 0) -> Tensor:
    """Warped logits: float32 [n, size], −inf for tokens that cannot be drawn.

    `logits` [n, size], of any floating type, are those of tokens `offset … offset + size - 1`; they are
    never changed, and returned as they are where nothing applies. NaN counts as −inf. Tokens outside the
    range are ignored in penalties and bias. top-k, top-p and min-p are only right over the whole
    vocabulary; among equal logits, the lower token is the more probable, so top-k keeps exactly k and
    top-p the fewest that reach its mass, at least one. A greedy row keeps penalties and bias, and skips
    the rest. Raises `ValueError` unless there is one context per row.
    """
    if len(contexts) != logits.shape[0]:
        raise ValueError(f"{len(contexts)} contexts for {logits.shape[0]} rows of logits")
    warped = _cleaned(logits)
    if all(_changes_nothing(context) for context in contexts):
        return warped
    if warped.data_ptr() == logits.data_ptr():
        warped = warped.clone()
    _penalise(warped, contexts, offset)
    _divide_by_temperature(warped, contexts)
    drawn = [(row, context.sampling) for row, context in enumerate(contexts) if not context.is_greedy]
    _on_rows(
        warped, [(row, sampling) for row, sampling in drawn if sampling.top_k or sampling.top_p < 1.0], _keep_leading
    )
    _on_rows(warped, [(row, sampling) for row, sampling in drawn if sampling.min_p], _drop_unlikely)
    return warped


def _changes_nothing(context: DecisionContext) -> bool:
    sampling = context.sampling
    if sampling.repetition_penalty != 1.0 or _adds(sampling):
        return False
    plain = sampling.temperature == 1.0 and not sampling.top_k and sampling.top_p >= 1.0 and not sampling.min_p
    return plain or context.is_greedy


def _cleaned(logits: Tensor) -> Tensor:
    """float32, without NaN and +inf; the same tensor if that is what it is already."""
    logits = logits.float()
    # Looking costs a GPU more than doing: nobody waits for it here. The comparison is false for NaN, too.
    if logits.numel() == 0 or (not logits.is_cuda and bool((logits.amax(dim=-1) < math.inf).all())):
        return logits
    return logits.nan_to_num(nan=-math.inf, posinf=_LARGEST_LOGIT, neginf=-math.inf)


def _adds(sampling: SamplingParameters) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)


# --- penalties and bias -----------------------------------------------------------------------


def _penalise(logits: Tensor, contexts: Sequence[DecisionContext], offset: int) -> None:
    """Apply penalties and bias in place."""

    def divide(values: Tensor, penalties: Tensor) -> Tensor:
        return torch.where(values > 0, values / penalties, values * penalties)

    repeated = [
        (row, token, context.sampling.repetition_penalty)
        for row, context in enumerate(contexts)
        if context.sampling.repetition_penalty != 1.0
        for token in set(context.tokens[:])  # a slice: some sequences are slow to read one by one
    ]
    _update(logits, repeated, offset, divide)
    added = [
        (row, token, amount)
        for row, context in enumerate(contexts)
        if _adds(context.sampling)
        for token, amount in _additions(context).items()
    ]
    _update(logits, added, offset, torch.add)


def _additions(context: DecisionContext) -> dict[int, float]:
    """What is added to the logit of each token: its bias, less its penalties."""
    sampling = context.sampling
    additions: dict[int, float] = {}
    for token, bias in sampling.logit_bias:
        additions[token] = additions.get(token, 0.0) + bias
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(context.tokens[context.prompt_len :]).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            additions[token] = additions.get(token, 0.0) - penalty
    return additions


def _update(
    logits: Tensor,
    entries: Iterable[tuple[int, int, float]],
    offset: int,
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replace the logits at distinct (row, token, amount) by `change(logits, amounts)`, in place."""
    size = logits.shape[1]
    inside = [(row, token - offset, amount) for row, token, amount in entries if 0 <= token - offset < size]
    if not inside:
        return
    rows, columns = send([entry[:2] for entry in inside], torch.int64, logits.device).unbind(dim=1)
    amounts = send([entry[2] for entry in inside], logits.dtype, logits.device)
    logits[rows, columns] = change(logits[rows, columns], amounts)


# --- temperature, top-k, top-p, min-p ---------------------------------------------------------


def _divide_by_temperature(logits: Tensor, contexts: Sequence[DecisionContext]) -> None:
    """In place, except in greedy rows."""
    divisors = [1.0 if context.is_greedy else context.sampling.temperature for context in contexts]
    if any(divisor != 1.0 for divisor in divisors):
        # A tensor: by a number, GPUs multiply by the reciprocal.
        logits /= send(divisors, logits.dtype, logits.device).unsqueeze(1)


def _on_rows(
    logits: Tensor,
    rows: Sequence[tuple[int, SamplingParameters]],
    change: Callable[[Tensor, Sequence[SamplingParameters]], None],
) -> None:
    """Let `change` work in place on those rows alone."""
    samplings = [sampling for _, sampling in rows]
    if len(rows) == logits.shape[0]:
        change(logits, samplings)
    elif rows:
        indices = places([row for row, _ in rows], logits)
        part = logits[indices]
        change(part, samplings)
        logits[indices] = part


def _drop_unlikely(logits: Tensor, samplings: Sequence[SamplingParameters]) -> None:
    """min-p, in place: p < min_p · p_best is a distance between logits."""
    gaps = send([math.log(sampling.min_p) for sampling in samplings], logits.dtype, logits.device).unsqueeze(1)
    logits.masked_fill_(logits < logits.amax(dim=1, keepdim=True) + gaps, -math.inf)


def _keep_leading(logits: Tensor, samplings: Sequence[SamplingParameters], candidates: int = _CANDIDATES) -> None:
    """top-k and top-p, in place: both keep the head of the order by falling logit, then rising token.

    Looks at the leading `candidates` first, and only in rows that may keep more of them at more.
    """
    vocabulary = logits.shape[1]
    limits = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    candidates = min(max([candidates, *(limit for limit in limits if limit < vocabulary)]), vocabulary)
    leaders = logits.topk(candidates, dim=1).values  # [n, candidates], falling
    counts = _leading_counts(logits, leaders, limits, [sampling.top_p for sampling in samplings])
    wide: list[int] = []
    if max(limits) > candidates:  # only then may the leaders not tell, and only then is the device asked
        wide = [row for row, count in enumerate(counts.squeeze(1).tolist()) if count > candidates]
    if wide:
        indices = places(wide, logits)
        part = logits[indices]
        _keep_leading(part, [samplings[row] for row in wide], candidates * 8)
    _keep_counted(logits, leaders, counts.clamp(max=candidates))
    if wide:
        logits[indices] = part


def _leading_counts(logits: Tensor, leaders: Tensor, limits: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """How many leading tokens each row keeps: int64 [n, 1]; more than there are leaders if they do not tell.

    `leaders` [n, candidates] are the largest logits in falling order, `limits` what top-k leaves; the mass
    that counts for top-p is that within top-k.
    """
    candidates = leaders.shape[1]
    limit = send(limits, torch.int64, logits.device).unsqueeze(1)  # [n, 1]
    if all(share >= 1.0 for share in top_p):
        return limit
    best = leaders[:, :1].clamp(min=torch.finfo(torch.float32).min)  # −inf less −inf would be NaN
    masses = _relative_probabilities(leaders - best).cumsum(dim=1)  # int64 [n, candidates]
    total = masses.gather(1, limit.clamp(max=candidates) - 1)
    if max(limits) > candidates:
        everything = _relative_probabilities(logits - best).sum(dim=1, keepdim=True)
        total = torch.where(limit > candidates, everything, total)
    share = send(top_p, torch.float64, logits.device).unsqueeze(1)
    wanted = (total * share).ceil().long().clamp(min=1).minimum(total)
    wanted = torch.where(share < 1.0, wanted, _ALL_MASS)
    # Those that fall short of what is wanted, and the one that reaches it.
    return ((masses < wanted).sum(dim=1, keepdim=True) + 1).minimum(limit)


def _keep_counted(logits: Tensor, leaders: Tensor, counts: Tensor) -> None:
    """Put −inf, in place, in all but the `counts` [n, 1] leading places."""
    edge = leaders.gather(1, counts - 1)  # [n, 1]: the least logit that is kept
    ties_kept = counts - (leaders > edge).sum(dim=1, keepdim=True)
    kept = logits >= edge
    at_edge = logits == edge
    if logits.is_cuda or bool((at_edge.sum(dim=1, keepdim=True) > ties_kept).any()):
        kept &= ~at_edge | (at_edge.cumsum(dim=1) <= ties_kept)
    logits.masked_fill_(~kept, -math.inf)


def _relative_probabilities(gaps: Tensor) -> Tensor:
    """e^gap in units of 2⁻⁴⁰, for gaps ≤ 0: int64, the same bits on every device.

    Exactly rounded operations only, and integers at the end: sums of these do not depend on their order.
    """
    powers = (gaps * (1.0 / _LN2)).clamp(min=-64.0)  # e^gap = 2^power
    whole = powers.round()
    rest = (powers - whole) * _LN2  # between −0.35 and 0.35
    series = torch.full_like(rest, _EXPONENTIAL_SERIES[0])
    for coefficient in _EXPONENTIAL_SERIES[1:]:
        series = series * rest + coefficient  # two kernels: nothing is fused
    exponents = whole.to(torch.int32) + (127 + _UNIT_BITS)
    return (series * (exponents << 23).view(torch.float32)).long()
