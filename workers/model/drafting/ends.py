"""The target's embedding, final norm and head, which every drafting module uses and none trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.transfer import onto

_SCALE_ROWS = 1024
"""About how many rows of the embedding its scale is computed from."""


class TargetEnds(nn.Module):
    """The frozen ends of a target. The head may be reduced to the rows of frequent tokens."""

    def __init__(
        self,
        embedding: Tensor,
        head: Tensor,
        norm: Tensor | None,
        epsilon: float,
        vocabulary: Tensor | None,
        bias: Tensor | None = None,
    ) -> None:
        """`norm` is `None` for a target without a final norm; `bias` [draft vocabulary] is added to its logits."""
        super().__init__()
        self.embedding: Tensor
        self.head: Tensor
        self.norm: Tensor | None
        self.bias: Tensor | None
        self.vocabulary: Tensor | None
        self.row_of: Tensor
        self.epsilon = epsilon
        """The value that the RMS norm before the head adds to the mean of squares before the root."""
        self.register_buffer("embedding", embedding, persistent=False)  # [target vocabulary, hidden size]
        self.register_buffer("head", head, persistent=False)  # [draft vocabulary, hidden size]
        self.register_buffer("norm", norm, persistent=False)  # [hidden size]
        self.register_buffer("bias", bias, persistent=False)  # [draft vocabulary]
        self.register_buffer("vocabulary", vocabulary, persistent=False)  # [draft vocabulary], int64, ascending
        self.register_buffer(
            "row_of", rows_of_tokens(vocabulary, len(embedding)), persistent=False
        )  # [target vocabulary]

    @property
    def hidden_size(self) -> int:
        """The width of the embedding and of the head."""
        return int(self.embedding.shape[1])

    def embedding_scale(self) -> float:
        """The RMS of the embedding. Features of this scale do not outweigh the tokens' embeddings in a sum of both."""
        rows = self.embedding[:: max(1, len(self.embedding) // _SCALE_ROWS)]
        return float(rows.float().pow(2).mean().sqrt())

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., hidden size] of token ids [...]."""
        return self.embedding[tokens]

    def normalised(self, hidden: Tensor) -> Tensor:
        """The target's final RMS norm of a residual stream [..., hidden size], in the data type of the ends.

        Without a final norm, the residual stream itself.
        """
        if self.norm is None:
            return hidden.to(self.head.dtype)
        return rms_norm(hidden, self.norm, self.epsilon)

    def final_states(self, states: Tensor) -> Tensor:
        """The target's final RMS norm of a residual stream [rows, hidden size], in float32 on the device of the ends.

        Without a final norm, the residual stream itself.
        """
        states = onto(self.embedding.device, states).float()
        return states if self.norm is None else rms_norm(states, self.norm.float(), self.epsilon)

    def initial_norm(self) -> Tensor:
        """Weights [hidden size] that a module's own final norm begins with: the target's, or ones if it has none."""
        return torch.ones_like(self.head[0]) if self.norm is None else self.norm.detach().clone()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] of hidden states [..., hidden size], which are normalised already."""
        return nn.functional.linear(hidden, self.head, self.bias)

    def logits_of(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """Logits [..., candidates] of rows of the head [..., candidates] alone, each with its own `hidden`."""
        found = (self.head[rows].to(hidden.dtype) @ hidden.unsqueeze(-1)).squeeze(-1)
        return found if self.bias is None else found + self.bias[rows]

    def tokens_of(self, rows: Tensor) -> Tensor:
        """The token ids of rows of the head."""
        return rows if self.vocabulary is None else self.vocabulary[rows]


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32 and returned in the data type of `weight`."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return wide.to(weight.dtype) * weight


def rows_of_tokens(vocabulary: Tensor | None, size: int) -> Tensor:
    """The row of the head of each of the target's tokens; -1 for tokens that cannot be proposed."""
    if vocabulary is None:
        return torch.arange(size)
    rows = torch.full((size,), -1, dtype=torch.long)
    rows[vocabulary.cpu()] = torch.arange(len(vocabulary))
    return rows
