"""One Llama-like decoder layer with explicit keys and values: rotary positions, grouped queries, SwiGLU, RMS norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.draft_shapes import LayerShape
from workers.model.drafting.ends import rms_norm


class DrafterLayer(nn.Module):
    """The weights of one layer. The owner decides what queries, keys and values are made of.

    `inputs` is the width of the queries' inputs, `context` the width of the inputs of keys and values.
    """

    def __init__(self, shape: LayerShape, inputs: int, context: int) -> None:
        super().__init__()
        self.shape = shape
        size, queries, keys = shape.hidden_size, shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(context, keys, bias=False)
        self.v_proj = nn.Linear(context, keys, bias=False)
        self.o_proj = nn.Linear(queries, size, bias=False)
        self.gate_proj = nn.Linear(size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, size, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(size))

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., tokens, heads, head width] of inputs [..., tokens, inputs]; positions [..., tokens]."""
        return self._rotated(self.q_proj(inputs), positions)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [..., tokens, KV heads, head width], of inputs [..., tokens, context]."""
        values = self.v_proj(inputs)
        return self._rotated(self.k_proj(inputs), positions), self._split(values)

    def outputs(self, residual: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The layer's output [rows, tokens, hidden size].

        `residual` [rows, tokens, hidden size] is the residual stream before the layer; `keys` and `values` are
        [rows, context, KV heads, head width]; `mask`, bool and broadcast to [rows, tokens, context], is true where a
        token attends to a context position; each token must attend to something.
        """
        groups = self.shape.heads // self.shape.kv_heads
        keys, values = (part.transpose(1, 2).to(queries.dtype) for part in (keys, values))
        if queries.device.type != "cpu":
            # Each head with keys of its own: with a mask, no fused kernel of CUDA groups queries.
            keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
            groups = 1
        found = nn.functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, attn_mask=mask.unsqueeze(1), enable_gqa=groups > 1
        )
        residual = residual + self.o_proj(found.transpose(1, 2).flatten(-2))
        inner = rms_norm(residual, self.mlp_norm, self.shape.norm_epsilon)
        added: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return residual + added

    def _rotated(self, projected: Tensor, positions: Tensor) -> Tensor:
        return rotate(self._split(projected), positions, self.shape.rope_theta)

    def _split(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.shape.head_width)


def rotate(states: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (Su et al. 2021) of [..., tokens, heads, head width], halves paired as in Llama.

    `positions` [..., tokens] are integers.
    """
    half = states.shape[-1] // 2
    steps = torch.arange(half, device=states.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * theta ** (-steps / half)  # [..., tokens, half]
    sine, cosine = angles.sin().unsqueeze(-2), angles.cos().unsqueeze(-2)
    low, high = states[..., :half].float(), states[..., half:].float()
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).to(states.dtype)


def embedding_and_feature(size: int) -> nn.Linear:
    """The matrix through which an embedding and a feature enter. It starts as the embedding alone."""
    entry = nn.Linear(2 * size, size, bias=False)
    nn.init.zeros_(entry.weight)
    with torch.no_grad():
        entry.weight[:, :size].fill_diagonal_(1.0)
    return entry


class TapFusion(nn.Module):
    """`W [norm(tap 1) | norm(tap 2) | ...]`: one vector of the hidden size from several taps of a position."""

    def __init__(self, taps: int, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.taps, self.hidden_size, self.epsilon = taps, hidden_size, epsilon
        self.norm = nn.Parameter(torch.ones(taps, hidden_size))
        self.proj = nn.Linear(taps * hidden_size, hidden_size, bias=False)

    def forward(self, taps: Tensor) -> Tensor:
        """Fused vectors [..., hidden size] of taps [..., taps x hidden size]."""
        fused: Tensor = self.proj(self.normalised(taps))
        return fused

    def normalised(self, taps: Tensor) -> Tensor:
        """Taps [..., taps x hidden size], each normalised by its own RMS."""
        parts = taps.reshape(*taps.shape[:-1], self.taps, self.hidden_size)
        return rms_norm(parts, self.norm, self.epsilon).flatten(-2)


class ContextProjection(nn.Module):
    """Keys and values of context positions for one layer, from normalised taps."""

    def __init__(self, shape: LayerShape, taps: int) -> None:
        super().__init__()
        self.shape = shape
        self.k_proj = nn.Linear(taps * shape.hidden_size, shape.kv_heads * shape.head_width, bias=False)
        self.v_proj = nn.Linear(taps * shape.hidden_size, shape.kv_heads * shape.head_width, bias=False)

    def forward(self, normalised: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [..., tokens, KV heads, head width], of [..., tokens, taps x hidden size]."""
        keys, values = (
            projected.view(*projected.shape[:-1], -1, self.shape.head_width)
            for projected in (self.k_proj(normalised), self.v_proj(normalised))
        )
        return rotate(keys, positions, self.shape.rope_theta), values
