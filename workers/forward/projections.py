"""What a layer's joint projections return: queries, keys and values before they are rotated; gates and values.

`Projections.rotated` is what kernels that rotate and store them in one launch are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """The RMSNorm of each head of queries and keys (Qwen3)."""

    queries: torch.Tensor  # [dim]
    keys: torch.Tensor  # [dim]
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """Queries, keys and values of the step's tokens, with contiguous numbers of a token."""

    queries: torch.Tensor  # [tokens, heads * dim]
    keys: torch.Tensor  # [tokens, kv_heads * dim]
    values: torch.Tensor  # [tokens, kv_heads * dim]
    cosines: torch.Tensor  # [tokens, turned]: the first `turned` numbers of a head are rotated
    sines: torch.Tensor  # [tokens, turned]
    dim: int
    """Numbers of a head."""
    norms: HeadNorms | None = None

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys after their norms and the rotary embedding, and values, `[tokens, heads, dim]` each."""
        queries, keys, values = (part.view(len(part), -1, self.dim) for part in (self.queries, self.keys, self.values))
        if self.norms is not None:
            queries = rms_norm(queries, self.norms.queries, self.norms.epsilon)
            keys = rms_norm(keys, self.norms.keys, self.norms.epsilon)
        return self._rotate(queries), self._rotate(keys), values

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        turned = self.cosines.shape[-1]
        first, second = heads[..., :turned].chunk(2, dim=-1)
        cosines, sines = self.cosines[:, None], self.sines[:, None]
        rotated = heads[..., :turned] * cosines + torch.cat((-second, first), dim=-1) * sines
        return torch.cat((rotated, heads[..., turned:]), dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """The two halves of a feed-forward network's wide projection, of which `silu(gates) * values` goes on."""

    gates: torch.Tensor  # [tokens, inner]: rows may lie apart, their numbers may not
    values: torch.Tensor  # [tokens, inner], as the gates

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.gates)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32 (Zhang and Sennrich, 2019).

    A weight of the rows' type multiplies rounded numbers, one of float32 numbers that are rounded afterwards.
    """
    wide = rows.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (weight * scaled.to(weight.dtype)).to(rows.dtype)
