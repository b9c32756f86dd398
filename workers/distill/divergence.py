"""The loss of a training: the divergence between the student's distribution and the target's.

The known part of the target's distribution is its most probable tokens and the mass of all others (the remainder). The
divergences are exact over this partition, and exact over the vocabulary where every token is known. Tokens that the
student cannot propose are removed from the target's distribution, which is then normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError, shorten
from workers.distill.options import LOSSES

_LEAST = 1e-6
"""Lower bound of a remainder's probability, so that its logarithm is finite."""

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_kl(student: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """KL(target ‖ student), as in knowledge distillation (Hinton et al. 2015).

    Log-probabilities [positions, outcomes] of both; `known` says which outcomes exist. Returns [positions].
    """
    return (target.exp() * (target - student)).masked_fill(~known, 0.0).sum(dim=-1)


def reverse_kl(student: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """KL(student ‖ target), which seeks the target's modes (MiniLLM, Gu et al. 2023; DistillSpec, Zhou et al. 2023)."""
    return (student.exp() * (student - target)).masked_fill(~known, 0.0).sum(dim=-1)


def overlap(student: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """One minus the sum of min(p, q): the share of tokens that the best coupling of both rejects (total variation).

    Its gradient is small where the student is far from the target: train by a KL divergence first.
    """
    return 1 - torch.minimum(student.exp(), target.exp()).masked_fill(~known, 0.0).sum(dim=-1)


FORWARD_KL = LOSSES[0]
DIVERGENCES: dict[str, Divergence] = dict(zip(LOSSES, (forward_kl, reverse_kl, overlap), strict=True))


def divergence_named(name: str, overlap_weight: float = 0.0) -> Divergence:
    """The divergence of that name, with so many times `overlap` added. Raises `ConfigurationError` for another name."""
    if name not in DIVERGENCES:
        raise ConfigurationError(f"loss: {shorten(name)} is unknown; it must be one of {', '.join(DIVERGENCES)}")
    return partial(_with_overlap, DIVERGENCES[name], overlap_weight) if overlap_weight else DIVERGENCES[name]


def _with_overlap(divergence: Divergence, weight: float, student: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """A divergence [positions] and, `weight` times, what the best coupling of both distributions rejects."""
    return divergence(student, target, known) + weight * overlap(student, target, known)


def distillation_loss(
    logits: Tensor, leading: Tensor, log_probabilities: Tensor, divergence: Divergence, rejection_weight: float = 1.0
) -> Tensor:
    """The mean of `divergences` over positions.

    Positions count `rejection_weight` times where the student's most probable token is not the target's.
    """
    found = divergences(logits, leading, log_probabilities, divergence)
    if rejection_weight == 1.0:
        return found.mean()
    best = leading.gather(1, log_probabilities.argmax(dim=1, keepdim=True)).squeeze(1)
    weights = torch.where(logits.argmax(dim=-1) == best, 1.0, rejection_weight)
    return (found * weights).sum() / weights.sum()


def divergences(logits: Tensor, leading: Tensor, log_probabilities: Tensor, divergence: Divergence) -> Tensor:
    """The divergence at each position, [positions]; 0 where the student has none of the target's tokens.

    `logits` [positions, draft vocabulary] are the student's. `leading` [positions, alternatives] are the target's most
    probable tokens as rows of the student's head; -1 for a token that is unknown or that the student cannot propose.
    `log_probabilities` [positions, alternatives] are the target's; -inf for an unknown token.
    """
    logits = logits.float()
    known = leading >= 0
    ours = logits.gather(1, leading.clamp(min=0)) - logits.logsumexp(dim=-1, keepdim=True)
    learnable = known.any(dim=-1)
    losses = divergence(*_partition(ours, log_probabilities, known, logits.shape[1]))
    return losses.masked_fill(~learnable, 0.0)


def _partition(
    student: Tensor, target: Tensor, known: Tensor, draft_vocabulary_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both distributions over the known tokens and the remainder; the target's is normalised over the known ones."""
    remainder = (1 - target.exp().sum(dim=-1, keepdim=True)).clamp(min=_LEAST)
    has_remainder = (known.sum(dim=-1, keepdim=True) < draft_vocabulary_size).expand_as(remainder)
    target = torch.cat([target, remainder.log()], dim=-1)
    left = 1 - student.exp().masked_fill(~known, 0.0).sum(dim=-1, keepdim=True)
    student = torch.cat([student, left.clamp(min=_LEAST).log()], dim=-1)
    known = torch.cat([known, has_remainder], dim=-1)
    target = target.masked_fill(~known, -torch.inf)
    target = (target - target.logsumexp(dim=-1, keepdim=True)).masked_fill(~known, 0.0)
    return student.masked_fill(~known, 0.0), target, known
