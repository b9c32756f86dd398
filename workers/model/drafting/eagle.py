"""An EAGLE-3-like head (Li et al. 2025): decoder layers that draft token by token from the target's taps.

The input at position i is the fused taps of i and the embedding of the token at i + 1; the output predicts the token at
i + 2. Beyond the committed text, the head's own output takes the place of the fused taps. Embedding and feature enter
through one matrix, as in EAGLE (Li et al. 2024), which starts as the embedding alone: the layers of a draft model that
reads tokens only are then a good start.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.draft_shapes import EagleShape
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.layer import DrafterLayer, TapFusion, embedding_and_feature


class EagleHead(nn.Module):
    """Decoder layers with their own keys and values, which the caller keeps."""

    def __init__(self, ends: TargetEnds, shape: EagleShape, taps: int) -> None:
        super().__init__()
        self.shape = shape
        size, epsilon = shape.layer.hidden_size, shape.layer.norm_epsilon
        self.fusion = TapFusion(taps, size, epsilon)
        self.feature_norm = nn.Parameter(torch.full((size,), ends.embedding_scale()))
        self.entry = embedding_and_feature(size)
        self.input_norms = nn.Parameter(torch.ones(shape.layers, size))
        self.layers = nn.ModuleList(DrafterLayer(shape.layer, size, size) for _ in range(shape.layers))
        self.output_norm = nn.Parameter(ends.initial_norm().float())

    def forward(
        self, features: Tensor, following: Tensor, positions: Tensor, past: tuple[Tensor, Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [rows, tokens, hidden size], and the keys and values to keep.

        `features` [rows, tokens, hidden size] are fused taps (`fusion`) or earlier outputs at `positions`
        [rows, tokens]; `following` [rows, tokens, hidden size] are embeddings of the tokens one position later. `past`
        are keys and values; keys and values are [rows, tokens, layers x KV heads, head width], layer by layer. `mask`,
        bool and broadcast to [rows, tokens, past + tokens], is true where a token attends to. An output serves as a
        feature of the next position, and `normalised` makes it ready for the head.
        """
        epsilon = self.shape.layer.norm_epsilon
        normalised = rms_norm(features, self.feature_norm, epsilon)
        outputs = self.entry(torch.cat([following.to(normalised.dtype), normalised], dim=-1))
        heads = self.shape.layer.kv_heads
        found: list[tuple[Tensor, Tensor]] = []
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, DrafterLayer):
                raise TypeError(f"layers: {type(layer).__name__} is refused; it must be DrafterLayer")
            inputs = rms_norm(outputs, self.input_norms[number], epsilon)
            keys, values = layer.keys_values(inputs, positions)
            found.append((keys, values))
            own = slice(number * heads, (number + 1) * heads)
            outputs = layer.outputs(
                outputs,
                layer.queries(inputs, positions),
                torch.cat([past[0][:, :, own], keys], dim=1),
                torch.cat([past[1][:, :, own], values], dim=1),
                mask,
            )
        return outputs, torch.cat([keys for keys, _ in found], 2), torch.cat([values for _, values in found], 2)

    def normalised(self, outputs: Tensor) -> Tensor:
        """Hidden vectors [..., hidden size] for the head."""
        return rms_norm(outputs, self.output_norm, self.shape.layer.norm_epsilon)

    def no_past(self, rows: int) -> tuple[Tensor, Tensor]:
        """Empty keys and values, [rows, 0, layers x KV heads, head width]."""
        shape = self.shape
        empty = self.output_norm.new_zeros((rows, 0, shape.layers * shape.layer.kv_heads, shape.layer.head_width))
        return empty, empty
