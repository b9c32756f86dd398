"""How far the student is from the target: what training makes small.

The target's distribution is known as its most probable tokens and one remainder; over that partition both divergences
are computed exactly. With every token named there is no remainder, and they are the divergences themselves. Tokens
that the student cannot guess are left out of the target's distribution, and the rest is scaled up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError, shorten

_LEAST = 1e-6
"""No less than this is taken for a remainder's probability: its logarithm stays finite."""

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_kl(student: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """KL(target ‖ student), as in knowledge distillation (Hinton et al. 2015).

    Log-probabilities [positions, outcomes] of both; `known` says which outcomes exist. Returns [positions].
    """
    return (target.exp() * (target - student)).masked_fill(~known, 0.0).sum(dim=-1)


def reverse_kl(student: Tensor, target: Tensor, known: Tensor) -> Tensor:
    """KL(student ‖ target), which seeks the target's modes (MiniLLM, Gu et al. 2023; DistillSpec, Zhou et al. 2023)."""
    return (student.exp() * (student - target)).masked_fill(~known, 0.0).sum(dim=-1)


DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl}


def divergence_named(name: str) -> Divergence:
    """Raises `ConfigurationError` for an unknown name."""
    if name not in DIVERGENCES:
        raise ConfigurationError(f"loss: {shorten(name)} is unknown; it must be one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]


def distillation_loss(logits: Tensor, leading: Tensor, log_probabilities: Tensor, divergence: Divergence) -> Tensor:
    """The mean divergence over positions. Positions where nothing can be learned count 0.

    `logits` [positions, guessable], the student's; `leading` [positions, alternatives], the target's most probable
    tokens as positions in the student's head (-1: cannot be guessed, or not known); `log_probabilities` [positions,
    alternatives], the target's, of all its tokens (-inf: not known).
    """
    logits = logits.float()
    known = leading >= 0
    ours = logits.gather(1, leading.clamp(min=0)) - logits.logsumexp(dim=-1, keepdim=True)
    learnable = known.any(dim=-1)
    losses = divergence(*_partition(ours, log_probabilities, known, logits.shape[1]))
    return losses.masked_fill(~learnable, 0.0).mean()


def _partition(student: Tensor, target: Tensor, known: Tensor, guessable: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both distributions over the known tokens and the remainder, the target's scaled up to what can be guessed."""
    remainder = (1 - target.exp().sum(dim=-1, keepdim=True)).clamp(min=_LEAST)
    has_remainder = (known.sum(dim=-1, keepdim=True) < guessable).expand_as(remainder)
    target = torch.cat([target, remainder.log()], dim=-1)
    left = 1 - student.exp().masked_fill(~known, 0.0).sum(dim=-1, keepdim=True)
    student = torch.cat([student, left.clamp(min=_LEAST).log()], dim=-1)
    known = torch.cat([known, has_remainder], dim=-1)
    target = target.masked_fill(~known, -torch.inf)
    target = (target - target.logsumexp(dim=-1, keepdim=True)).masked_fill(~known, 0.0)
    return student.masked_fill(~known, 0.0), target, known
