"""Medusa heads (Cai et al. 2024): every head predicts the token at its own depth from one hidden state of the target.

The target has decided the next token when drafting begins. So a low-rank layer first adds this token's embedding to the
hidden state, as in Hydra (Ankner et al. 2024), and the first head predicts the token after it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.draft_shapes import HeadsShape
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.selector import Selector


class MedusaHeads(nn.Module):
    """`u = h + B SiLU(A [h; e])` and `u + SiLU(W_i u)` for each depth i; h is normalised by the target's final norm.

    W is zero at first, as in Medusa, and so is B. Serving and training call the same `forward`: heads have no state.
    """

    def __init__(self, ends: TargetEnds, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        size = ends.hidden_size
        self.mix = Selector(size, shape.mix_rank) if shape.mix_rank else None
        self.weights = nn.Parameter(torch.zeros(shape.depths * size, size))  # [depth and output, input]
        self.selector = Selector(size, shape.selector_rank) if shape.selector_rank else None

    def forward(self, hidden: Tensor, last: Tensor) -> Tensor:
        """Hidden vectors for the head, [..., depths, hidden size].

        `hidden` [..., hidden size] is the target's final norm of its residual stream after the last layer at position
        n-2; `last` [..., hidden size] is the embedding of the token at n-1. Depth i (from 0) predicts position n+i.
        """
        mixed = hidden if self.mix is None else self.mix(hidden, last)
        deep = nn.functional.linear(mixed, self.weights).view(*mixed.shape[:-1], self.shape.depths, mixed.shape[-1])
        return mixed.unsqueeze(-2) + nn.functional.silu(deep)
