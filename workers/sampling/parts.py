"""top-k, top-p and min-p over a vocabulary whose parts ranks have, without gathering logits.

The order of tokens by logit is one number of 32 bits. Each round adds up the tokens of all parts (top-k) or their
probability masses (top-p) by the next digit of that number, so after four rounds every rank knows the smallest logit
that is kept. Of the tokens that have this logit, the lowest are kept: what ranks before this one have of them is known
from the last round. All sums are of integers, so the tokens that are kept are those of `truncate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from workers.sampling.context import DecisionContext
from workers.sampling.noise import gumbel
from workers.sampling.truncate import mass_to_reach, relative_masses
from workers.sampling.warp import untruncated
from workers.transfer import tensor_on

DIGIT_BITS = 8
"""Bits that a round of all ranks finds of a logit."""
_BINS = 1 << DIGIT_BITS
_SHIFTS = (24, 16, 8, 0)
"""Bits below each digit of a logit."""
_NO_LIMIT = 1 << 62
_MOST_ELEMENTS = 1 << 24
"""Logits processed at a time."""
_LEAST_SHARE = 4
"""On a CPU, noise is drawn for kept tokens alone where the part is at least this many times as wide as they are."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How a rank that has a part of the vocabulary learns what the other ranks find in theirs."""

    index: int
    """Number of parts whose tokens come before this one's."""
    vocabulary: int
    """Tokens of all parts."""
    all_gather: Callable[[Tensor], Tensor]
    """Returns all ranks' tensors `[parts, …]`, in the order of their tokens. All ranks call it together."""


def truncated_winners(
    logits: Tensor, contexts: Sequence[DecisionContext], offset: int, parts: Parts
) -> tuple[Tensor, Tensor]:
    """The best score of each row of logits [n, part], float32 [n], and its token, int64 [n].

    All rows are truncated (`DecisionContext.is_truncated`), and the logits are those of tokens
    `offset … offset + part - 1`. All ranks call this with the same contexts.
    """
    values = torch.empty(len(contexts), device=logits.device)
    ids = torch.empty(len(contexts), dtype=torch.int64, device=logits.device)
    rows = max(1, _MOST_ELEMENTS // parts.vocabulary)  # the same on all ranks, whose parts differ in size
    for first in range(0, len(contexts), rows):
        part = slice(first, first + rows)
        values[part], ids[part] = _winners(logits[part].detach(), contexts[part], offset, parts)
    return values, ids + offset


def _winners(logits: Tensor, contexts: Sequence[DecisionContext], offset: int, parts: Parts) -> tuple[Tensor, Tensor]:
    """The best score of each row, and its column."""
    warped = untruncated(logits, contexts, offset)
    truncate_part(warped, [context.sampling for context in contexts], parts)
    columns = None
    if not warped.is_cuda:  # on a GPU, waiting for the kept tokens costs more
        most = max(1, int((warped > -math.inf).sum(dim=1).max()))
        if most * _LEAST_SHARE <= warped.shape[1]:
            columns = warped.topk(most, dim=1, sorted=False).indices.sort(dim=1).values
            warped = warped.gather(1, columns)
    seeds, positions = zip(*((context.sampling.seed, context.position) for context in contexts), strict=True)
    scores = gumbel(seeds, positions, offset, logits.shape[1], logits.device, columns).add_(warped)
    best = scores.max(dim=1)  # the first among equals
    found = best.indices if columns is None else columns.gather(1, best.indices[:, None]).squeeze(1)
    return best.values, found


def truncate_part(logits: Tensor, samplings: Sequence[SamplingParameters], parts: Parts) -> None:
    """Set the logits that top-k, top-p and then min-p exclude to −inf, in place, in float32 [n, part].

    Among the logits of all parts, those are kept that `truncate` keeps. All ranks call this together.
    """
    device = logits.device
    best = parts.all_gather(logits.amax(dim=1)).amax(dim=0).unsqueeze(1)  # [n, 1]
    order = _order(logits)
    kept = None
    limits = [one.top_k if 0 < one.top_k < parts.vocabulary else _NO_LIMIT for one in samplings]
    if min(limits) < _NO_LIMIT:
        limit = tensor_on(device, limits, torch.int64).unsqueeze(1)
        kept = _leading(order, torch.ones_like(order), lambda _: limit, parts)
    shares = [one.top_p for one in samplings]
    if min(shares) < 1.0:
        masses = relative_masses(logits - best.clamp(min=torch.finfo(torch.float32).min))
        if kept is not None:
            masses *= kept
        leading = _leading(order, masses, lambda total: mass_to_reach(total, shares), parts)
        kept = leading if kept is None else leading & kept
    if kept is not None:
        logits.masked_fill_(~kept, -math.inf)
    if any(one.min_p for one in samplings):
        gaps = [math.log(one.min_p) if one.min_p else -math.inf for one in samplings]
        logits.masked_fill_(logits < best + tensor_on(device, gaps, logits.dtype).unsqueeze(1), -math.inf)


def _order(logits: Tensor) -> Tensor:
    """Numbers of 32 bits in the order of logits, int64; both zeros have the same."""
    bits = (logits + 0.0).view(torch.int32)  # minus zero and zero is zero
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)


def _leading(order: Tensor, weights: Tensor, wanted_of: Callable[[Tensor], Tensor], parts: Parts) -> Tensor:
    """Mask of the tokens that come first among all parts, until their weights reach what is wanted: bool [n, part].

    `order` [n, part] and `weights` [n, part] are integers. `wanted_of` maps the total weights of all parts [n, 1] to
    what is wanted. The largest tokens come first, and among equal ones the lowest. Where the weights do not reach it,
    all tokens do.
    """
    bins = torch.arange(_BINS, device=order.device)
    prefixes = torch.zeros(len(order), 1, dtype=torch.int64, device=order.device)
    digits, wanted, found = prefixes, prefixes, prefixes
    rows, numbers, counted = (
        torch.arange(len(order), device=order.device).repeat_interleave(order.shape[1]),
        order.flatten(),
        weights.flatten(),
    )
    for shift in _SHIFTS:
        if shift < _SHIFTS[0]:
            matches = (numbers >> (shift + DIGIT_BITS)) == prefixes.view(-1)[rows]
            if order.is_cuda:  # the host would wait for the number of those that match
                counted = counted * matches
            else:
                rows, numbers, counted = rows[matches], numbers[matches], counted[matches]
        sums = torch.zeros(len(order) * _BINS, dtype=torch.int64, device=order.device)
        sums.scatter_add_(0, rows * _BINS + ((numbers >> shift) & (_BINS - 1)), counted)
        found = parts.all_gather(sums.view(len(order), _BINS))  # [parts, n, bins]
        upwards = found.sum(dim=0).flip(1).cumsum(dim=1).flip(1)
        if shift == _SHIFTS[0]:
            wanted = wanted_of(upwards[:, :1])
        digits = torch.where(upwards >= wanted, bins, 0).amax(dim=1, keepdim=True)
        wanted = wanted - (upwards.gather(1, digits) - found.sum(dim=0).gather(1, digits))
        prefixes = (prefixes << DIGIT_BITS) + digits
    wanted = wanted - found[: parts.index].sum(dim=0).gather(1, digits)  # of this part's tokens with that logit
    at_edge = order == prefixes
    equal = weights * at_edge
    return (order > prefixes) | (at_edge & (equal.cumsum(dim=1) - equal < wanted))
