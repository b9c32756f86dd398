"""A block drafter: predicts the next `block` tokens in one pass (DFlash, Chen et al. 2026; P-EAGLE).

One slot for each token. All slots start from the embedding of the last committed token and the fused taps of the
position before it, and differ by a learned vector and by their rotary position. They attend to the context, whose keys
and values come from the taps of each position alone, and to each other in both directions. Embedding and features enter
through one matrix that starts as the embedding alone: then the first slot can start as a draft model that reads tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.draft_shapes import BlockShape
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.layer import ContextProjection, DrafterLayer, TapFusion, embedding_and_feature
from workers.model.drafting.selector import Selector


class BlockDrafter(nn.Module):
    """Drafts with `context` for new positions, whose keys and values are kept, and then `forward` for each block."""

    def __init__(self, ends: TargetEnds, shape: BlockShape, taps: int) -> None:
        super().__init__()
        self.shape = shape
        size, epsilon = shape.layer.hidden_size, shape.layer.norm_epsilon
        self.fusion = TapFusion(taps, size, epsilon)
        self.entry = embedding_and_feature(size)
        self.slots = nn.Parameter(torch.zeros(shape.block, size))
        self.input_norms = nn.Parameter(torch.ones(shape.layers, size))
        self.feature_norm = nn.Parameter(torch.full((size,), ends.embedding_scale()))
        self.layers = nn.ModuleList(DrafterLayer(shape.layer, size, size) for _ in range(shape.layers))
        self.contexts = nn.ModuleList(ContextProjection(shape.layer, taps) for _ in range(shape.layers))
        self.output_norm = nn.Parameter(ends.initial_norm().float())
        self.selector = Selector(size, shape.selector_rank) if shape.selector_rank else None

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What later blocks need of context positions; each position depends on its own taps alone.

        `taps` is [..., tokens, taps x hidden size], `positions` [..., tokens]. Returns fused taps
        [..., tokens, hidden size], and keys and values [layers, ..., tokens, KV heads, head width]. Only the last
        `shape.layer.window` positions are ever attended to.
        """
        normalised = self.fusion.normalised(taps)
        fused = self.fusion.proj(normalised)
        found = [part(normalised, positions) for part in self.contexts]
        return fused, torch.stack([keys for keys, _ in found]), torch.stack([values for _, values in found])

    def forward(
        self, last: Tensor, fused: Tensor, positions: Tensor, keys: Tensor, values: Tensor, context: Tensor
    ) -> Tensor:
        """Normalised hidden vectors for the head, [rows, anchors, block, hidden size].

        An anchor is a last committed token; serving has one in each row, training many. Slot j of an anchor at
        position p predicts the token at p + 1 + j. `last` [rows, anchors, hidden size] is the anchor's embedding,
        `fused` [rows, anchors, hidden size] the fused taps of position p - 1, `positions` [rows, anchors] is p.
        `keys` and `values` [layers, rows, context, KV heads, head width] come from `context()`; `context`
        [rows, context] are their positions, -1 for padding. An anchor attends to those before it, within the window.
        """
        shape = self.shape
        epsilon = shape.layer.norm_epsilon
        rows, anchors = positions.shape
        features = rms_norm(fused, self.feature_norm, epsilon)
        common = self.entry(torch.cat([last.to(features.dtype), features], dim=-1))
        residual = (common.unsqueeze(-2) + self.slots).flatten(1, 2)  # [rows, anchors x block, hidden size]
        places = (positions.unsqueeze(-1) + torch.arange(shape.block, device=positions.device)).flatten(1, 2)
        mask = self._mask(positions, context)
        for number, layer in enumerate(self._layers()):
            inputs = rms_norm(residual, self.input_norms[number], epsilon)
            own_keys, own_values = layer.keys_values(inputs, places)
            residual = layer.outputs(
                residual,
                layer.queries(inputs, places),
                torch.cat([keys[number], own_keys], dim=1),
                torch.cat([values[number], own_values], dim=1),
                mask,
            )
        return rms_norm(residual, self.output_norm, epsilon).view(rows, anchors, shape.block, -1)

    def _mask(self, positions: Tensor, context: Tensor) -> Tensor:
        """[rows, anchors x block, context + anchors x block]: the context before an anchor, and its own block."""
        before, anchor = context.unsqueeze(1), positions.unsqueeze(2)
        seen = (before >= 0) & (before < anchor) & (before >= anchor - self.shape.layer.window)
        seen = seen.repeat_interleave(self.shape.block, dim=1)
        block = torch.arange(positions.shape[1], device=positions.device).repeat_interleave(self.shape.block)
        own = (block.unsqueeze(0) == block.unsqueeze(1)).expand(len(positions), -1, -1)
        return torch.cat([seen, own], dim=-1)

    def _layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]
