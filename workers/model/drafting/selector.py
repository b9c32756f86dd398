"""The selector: corrects a hidden vector by the token before, so that the tokens of one path fit together.

Heads and block drafters predict all depths at once, so the prediction at one depth does not know the token at the depth
before. Sequential heads condition on it (Hydra, Ankner et al. 2024). Here a low-rank layer does, and it scores only the
most probable candidates again, so that its cost is a few rows of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.drafting.ends import TargetEnds

CANDIDATES = 16
"""Tokens of each depth that the selector scores, by probability without it."""


class Selector(nn.Module):
    """`h + B SiLU(A [h; e])`, of rank `rank`. B is zero at first, so that an untrained selector changes nothing."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * hidden_size, rank, bias=False)
        self.outer = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.outer.weight)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Corrected hidden vectors [..., hidden size], given the embedding [..., hidden size] of the token before."""
        mixed: Tensor = self.outer(nn.functional.silu(self.inner(torch.cat([hidden, previous], dim=-1))))
        return hidden + mixed


def top_candidates(ends: TargetEnds, hidden: Tensor, count: int = CANDIDATES) -> tuple[Tensor, Tensor]:
    """The most probable tokens of hidden vectors [..., hidden size], without a selector.

    Returns rows of the head and natural log-probabilities, both [..., count], most probable first.
    """
    logits = ends.logits(hidden).float()
    values, rows = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return rows, values - logits.logsumexp(dim=-1, keepdim=True)
