"""The loss of slots against the target's probabilities, without the gradient of all logits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 4096
"""Slots whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class SlotGoals:
    """What slots should predict, and how much each counts."""

    leading: Tensor
    """[slots, leading] int64: the target's most probable tokens, the first one first."""
    shares: Tensor
    """[slots, leading] float32: their probabilities."""
    weights: Tensor
    """[slots] Multiply the losses."""
    overlap: float
    """Weight of the share that draft and target have in common, relative to the cross entropy."""

    def part(self, slots: slice) -> SlotGoals:
        """The goals of some slots."""
        return SlotGoals(self.leading[slots], self.shares[slots], self.weights[slots], self.overlap)


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """The loss of slots, and how good their predictions are."""

    loss: Tensor
    """A number."""
    is_right: Tensor
    """[slots] Whether the most probable token is the target's."""


def head_loss(vectors: Tensor, head: Tensor, second: Tensor, goals: SlotGoals) -> HeadLoss:
    """The sum of the losses of slots: cross entropy against the target, minus what both distributions share.

    `vectors` [slots, hidden size + rank] are multiplied with the target's `head` [vocabulary, hidden size] and the
    Markov head's `second` matrix [vocabulary, rank], side by side.
    """
    loss, is_right = _Loss.apply(vectors, head, second, goals)  # type: ignore[no-untyped-call]
    return HeadLoss(loss, is_right)


@dataclass(frozen=True, slots=True)
class _PartLoss:
    """The loss of some slots, and its gradients."""

    loss: Tensor
    is_right: Tensor
    inner: Tensor
    """[slots, hidden size + rank] Of the vectors."""
    gradient: Tensor
    """[slots, vocabulary] Of the logits."""


def _part_loss(vectors: Tensor, joint: Tensor, goals: SlotGoals) -> _PartLoss:
    """The loss of slots whose logits are in memory at once; both gradients are in the type of `joint`."""
    leading, wanted, overlap, weight = goals.leading, goals.shares, goals.overlap, goals.weights.unsqueeze(1)
    logits = vectors @ joint.T
    is_right = logits.argmax(dim=-1) == leading[:, 0]
    drafted = torch.softmax(logits, dim=-1, dtype=torch.float32)
    del logits
    found = drafted.gather(1, leading)
    less = torch.where(found < wanted, found, 0.0)
    entropy = -(wanted * found.clamp(min=1e-9).log()).sum(dim=1, keepdim=True)
    common = torch.minimum(found, wanted).sum(dim=1, keepdim=True)
    loss = (weight * (entropy - overlap * common)).sum()
    total = wanted.sum(dim=1, keepdim=True) + overlap * less.sum(dim=1, keepdim=True)
    drafted.mul_(total * weight).scatter_add_(1, leading, -weight * (wanted + overlap * less))
    gradient = drafted.to(joint.dtype)
    return _PartLoss(loss, is_right, gradient @ joint, gradient)


class _Loss(torch.autograd.Function):
    """Computes the gradient of a part's logits while they are in memory."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, head: Tensor, second: Tensor, goals: SlotGoals) -> tuple[Tensor, Tensor]:
        weights = goals.weights
        joint = torch.cat([head, second.to(head.dtype)], dim=1)
        vectors = vectors.to(head.dtype)
        rank = second.shape[1]
        inner, outer = torch.empty_like(vectors), torch.zeros_like(second, dtype=torch.float32)
        loss, is_right = weights.new_zeros(()), torch.empty_like(weights, dtype=torch.bool)
        for first in range(0, len(vectors), _CHUNK):
            part = slice(first, first + _CHUNK)
            found = _part_loss(vectors[part], joint, goals.part(part))
            is_right[part], inner[part] = found.is_right, found.inner
            loss += found.loss
            outer += (found.gradient.T @ vectors[part, -rank:]).float()
            del found
        ctx.save_for_backward(inner, outer)
        ctx.mark_non_differentiable(is_right)
        return loss, is_right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inner, outer = ctx.saved_tensors
        scale = gradients[0]
        return inner * scale, None, outer * scale, None
