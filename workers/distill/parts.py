"""Trainable parts of Llama-like layers, with the names of public checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


class Norm(nn.Module):
    """An RMS norm over the last dimension, in float32 and one kernel."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden.float(), self.weight.shape, self.weight, self._epsilon)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return found


class Turn:
    """Rotary positions [..., tokens] of the elements of a head."""

    def __init__(self, positions: Tensor, steps: Tensor, factor: float) -> None:
        """`steps` [head width / 2] and `factor` are those of `rotary_steps`."""
        angles = positions.float().unsqueeze(-1) * steps
        self._cosine, self._sine = (angles.cos() * factor).unsqueeze(-2), (angles.sin() * factor).unsqueeze(-2)

    def __call__(self, states: Tensor) -> Tensor:
        """Rotate [..., tokens, heads, head width], halves paired as in Llama. Returns float32."""
        low, high = states.float().chunk(2, dim=-1)
        turned = [low * self._cosine - high * self._sine, high * self._cosine + low * self._sine]
        return torch.cat(turned, dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention [rows, heads, tokens, head width] with a mask, all heads with keys of their own.

    On a GPU, never by cuDNN, which plans anew for each shape.
    """
    if not queries.is_cuda:
        return nn.functional.scaled_dot_product_attention(queries, keys, values, mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return nn.functional.scaled_dot_product_attention(queries, keys, values, mask)


def run_layer(layer: Callable[..., Any], *inputs: Any, recomputes: bool) -> Any:
    """The output of a layer. With `recomputes`, the backward pass computes its activations again."""
    if not recomputes or not torch.is_grad_enabled():
        return layer(*inputs)
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
