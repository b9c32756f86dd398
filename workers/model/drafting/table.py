"""A table of successors: the tokens that the target ranked highest most often after each token.

Token Recycling (Luo et al. 2024) drafts trees from it and keeps it current while it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.draft_shapes import TableShape


class SuccessorTable(nn.Module):
    """`successors` int32 [vocabulary, k]: most frequent first, -1 where fewer are known. It has no other state."""

    def __init__(self, shape: TableShape, vocabulary_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.successors: Tensor
        empty = torch.full((vocabulary_size, shape.successors), -1, dtype=torch.int32)
        self.register_buffer("successors", empty)

    def forward(self, tokens: Tensor) -> Tensor:
        """Successors [..., k] of token ids [...]."""
        return self.successors[tokens]
