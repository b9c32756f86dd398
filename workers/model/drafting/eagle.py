"""An EAGLE-3-like head (Li et al. 2025): one decoder layer that drafts token by token from the target's taps.

The input at position i is the fused taps of i and the embedding of the token at i + 1; the output predicts the token at
i + 2. Beyond the committed text, the layer's own output takes the place of the fused taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.draft_shapes import EagleShape
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.layer import DrafterLayer, TapFusion


class EagleHead(nn.Module):
    """One decoder layer with its own keys and values, which the caller keeps."""

    def __init__(self, ends: TargetEnds, shape: EagleShape, taps: int) -> None:
        super().__init__()
        self.shape = shape
        size, epsilon = shape.layer.hidden_size, shape.layer.norm_epsilon
        self.fusion = TapFusion(taps, size, epsilon)
        self.token_norm = nn.Parameter(torch.ones(size))
        self.feature_norm = nn.Parameter(torch.ones(size))
        self.layer = DrafterLayer(shape.layer, 2 * size, 2 * size)
        self.output_norm = nn.Parameter(ends.norm.detach().float().clone())

    def forward(
        self, features: Tensor, following: Tensor, positions: Tensor, past: tuple[Tensor, Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [rows, tokens, hidden size], and the keys and values [rows, tokens, KV heads, head width] to keep.

        `features` [rows, tokens, hidden size] are fused taps (`fusion`) or earlier outputs at `positions`
        [rows, tokens]; `following` [rows, tokens, hidden size] are embeddings of the tokens one position later. `past`
        are keys and values [rows, past, KV heads, head width]. `mask`, bool and broadcast to
        [rows, tokens, past + tokens], is true where a token attends to; see `causal`. An output serves as a feature of
        the next position, and `normalised` makes it ready for the head.
        """
        epsilon = self.shape.layer.norm_epsilon
        tokens = rms_norm(following, self.token_norm, epsilon)
        inputs = torch.cat([tokens, rms_norm(features, self.feature_norm, epsilon)], dim=-1)
        keys, values = self.layer.keys_values(inputs, positions)
        all_keys, all_values = torch.cat([past[0], keys], dim=1), torch.cat([past[1], values], dim=1)
        outputs = self.layer.outputs(features, self.layer.queries(inputs, positions), all_keys, all_values, mask)
        return outputs, keys, values

    def normalised(self, outputs: Tensor) -> Tensor:
        """Hidden vectors [..., hidden size] for the head."""
        return rms_norm(outputs, self.output_norm, self.shape.layer.norm_epsilon)

    def no_past(self, rows: int) -> tuple[Tensor, Tensor]:
        """Empty keys and values."""
        weight, shape = self.layer.k_proj.weight, self.shape.layer
        empty = weight.new_zeros((rows, 0, shape.kv_heads, shape.head_width))
        return empty, empty

    def causal(self, positions: Tensor, context: Tensor) -> Tensor:
        """The mask [rows, tokens, context] of a chain: earlier positions and itself, within the window.

        `positions` [rows, tokens], `context` [rows, context]: positions of all keys, -1 for padding.
        """
        own, key = positions.unsqueeze(2), context.unsqueeze(1)
        return (key >= 0) & (key <= own) & (key > own - self.shape.layer.window)
