"""Chooses the experts of each token, and their weights, from the logits of a mixture's router.

`ExpertChoice.of` is what the kernel that chooses in one launch is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The rule of a router: the experts with the largest logits, weighted by their shares of a softmax."""

    each: int
    """Experts of a token."""
    is_of_all: bool
    """Whether the weights are shares of all experts, and not of the chosen ones."""
    is_wide: bool
    """Whether the weights are of float32, and not of the logits' type."""

    def of(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits` `[tokens, experts]` → weights and numbers of the experts, `[tokens, each]`, the largest first."""
        best, chosen = logits.float().topk(self.each, dim=-1)
        shares = (best - logits.float().logsumexp(-1, keepdim=True)).exp() if self.is_of_all else best.softmax(-1)
        return shares if self.is_wide else shares.to(logits.dtype), chosen
