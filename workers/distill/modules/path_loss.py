"""The loss of predicted paths, and the length of the part of each path that the target accepts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.distill.divergence import divergence_named, divergences
from workers.distill.modules.batches import TapBatch
from workers.distill.modules.paths import Paths
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.selector import CANDIDATES, Selector, top_candidates


@dataclass(frozen=True, slots=True)
class PathWeights:
    """How much the tokens of a path count."""

    decay: float
    """A depth relative to the depth before."""
    rejection: float = 1.0
    """The first token whose most probable prediction is not the written one, so that the target would reject it."""
    overlap: float = 0.0
    """The share of a token that the best coupling rejects, beside its divergence."""


def path_loss(
    paths: Paths, batch: TapBatch, ends: TargetEnds, selector: Selector | None, counted: PathWeights, loss: str
) -> Tensor:
    """The mean divergence from the target over all predicted tokens, weighted by `counted` and by the batch's weights.

    A selector adds its own divergence among its candidates from depth 1 on, with the written token as the token before.
    """
    positions, is_known = _predicted(paths, batch)
    depth = torch.arange(paths.hidden.shape[1], device=positions.device).expand_as(positions)[is_known]
    rows, places = paths.rows.unsqueeze(1).expand_as(positions)[is_known], positions[is_known]
    hidden = paths.hidden[is_known]
    leading, log_probabilities = batch.leading[rows, places], batch.log_probabilities[rows, places]
    logits = ends.logits(hidden.to(ends.head.dtype))
    found = divergences(logits, leading, log_probabilities, divergence_named(loss, counted.overlap))
    weights = counted.decay ** depth.float() * (1.0 if batch.weights is None else batch.weights[rows, places])
    if counted.rejection != 1.0:
        is_right = logits.argmax(dim=-1) == ends.row_of[batch.tokens[rows, places]]
        weights = torch.where(_is_rejected(is_right, is_known), counted.rejection * weights, weights)
    total = (found * weights).sum() / weights.sum().clamp(min=1e-9)
    later = depth > 0
    if selector is None or not bool(later.any()):
        return total
    candidates = logits.detach()[later].topk(min(CANDIDATES, logits.shape[1]), dim=-1).indices
    previous = ends.embed(batch.tokens[rows[later], places[later] - 1])
    corrected = selector(hidden[later], previous.to(hidden.dtype))
    scores = ends.logits_of(candidates, corrected).float()
    chosen = _choice_loss(scores, candidates, leading[later], log_probabilities[later])
    return total + (chosen * weights[later]).sum() / weights[later].sum()


def _is_rejected(is_right: Tensor, is_known: Tensor) -> Tensor:
    """`[predictions]`: whether a token is the first wrong one of its path. `is_known` is `[paths, depths]`."""
    right = torch.zeros_like(is_known)
    right[is_known] = is_right
    reached = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].cumprod(dim=1) > 0], dim=1)
    return (reached & ~right)[is_known]


def accepted(paths: Paths, batch: TapBatch, ends: TargetEnds, selector: Selector | None) -> Tensor:
    """Tokens of each path's greedy chain that are the written ones, up to the first that is not, [paths] int64.

    In the part that is accepted, the token before is the written one, so no chain has to be drafted for the selector.
    """
    ranks, _ = written_ranks(paths, batch, ends, selector)
    return (ranks == 0).long().cumprod(dim=1).sum(dim=1)


def written_ranks(paths: Paths, batch: TapBatch, ends: TargetEnds, selector: Selector | None) -> tuple[Tensor, Tensor]:
    """The rank of each written token among the candidates below the written token before it, and where one is known.

    Both [paths, depths]: int64, -1 where it is no candidate or unknown, and bool.
    """
    positions, is_known = _predicted(paths, batch)
    rows = paths.rows.unsqueeze(1).expand_as(positions)
    places = positions.clamp(max=batch.tokens.shape[1] - 1)
    hidden = paths.hidden.to(ends.head.dtype)
    candidates, _ = top_candidates(ends, hidden)
    if selector is not None and hidden.shape[1] > 1:
        previous = ends.embed(batch.tokens[rows, places - 1][:, 1:])
        corrected = selector(paths.hidden[:, 1:], previous.to(paths.hidden.dtype)).to(ends.head.dtype)
        order = ends.logits_of(candidates[:, 1:], corrected).argsort(dim=-1, descending=True, stable=True)
        candidates = torch.cat([candidates[:, :1], candidates[:, 1:].gather(-1, order)], dim=1)
    is_written = (ends.tokens_of(candidates) == batch.tokens[rows, places].unsqueeze(-1)) & is_known.unsqueeze(-1)
    return torch.where(is_written.any(dim=-1), is_written.long().argmax(dim=-1), -1), is_known


def _predicted(paths: Paths, batch: TapBatch) -> tuple[Tensor, Tensor]:
    """The position of each predicted token, and whether the row has it; both [paths, depths]."""
    depths = torch.arange(paths.hidden.shape[1], device=paths.starts.device)
    positions = paths.starts.unsqueeze(1) + depths
    return positions, positions < batch.lengths[paths.rows].unsqueeze(1)


def _choice_loss(scores: Tensor, candidates: Tensor, leading: Tensor, log_probabilities: Tensor) -> Tensor:
    """KL(target ‖ selector) [predictions] among the candidates; 0 where none of them is among the target's tokens."""
    is_same = candidates.unsqueeze(2) == leading.unsqueeze(1)  # [predictions, candidates, alternatives]
    target = (is_same * log_probabilities.exp().unsqueeze(1)).sum(dim=-1)
    target = target / target.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    return (torch.xlogy(target, target) - target * scores.log_softmax(dim=-1)).sum(dim=-1)
