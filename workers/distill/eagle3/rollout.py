"""EAGLE-3's training-time test (Li et al. 2025): a head drafts several steps from its own outputs, all rows at once.

The input at position i is the feature of i and the embedding of the token at i + 1; the output predicts the token at
i + 2. At depth d, the feature is the head's own output of depth d - 1 at i - 1. The input then attends to the target's
features up to i - d, and after them to one position of each earlier depth: what it would have drafted itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.distill.eagle3.head import Eagle3Head


def roll_out(head: Eagle3Head, taps: Tensor, following: Tensor, depths: int) -> list[Tensor]:
    """The outputs [rows, tokens, hidden size] of each depth.

    `taps` [rows, tokens, taps x target's hidden size] are the target's at the first positions of each row, `following`
    [rows, tokens, hidden size] embeddings of the tokens after them. Outputs of depth d at positions below d are of no
    use.
    """
    features = head.features(taps)
    places = torch.arange(features.shape[1], device=features.device)
    behind = places.unsqueeze(1) - places  # [tokens, tokens] How far a position is before another one.
    context: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    for depth in range(depths):
        own = [behind == depth - earlier for earlier in range(1, depth + 1)]
        mask = torch.cat([behind >= depth, *own], dim=1)
        output, keys, values = head(features, following, places, context, mask)
        context.append((keys, values))
        outputs.append(output)
        features = torch.cat([output[:, :1], output[:, :-1]], dim=1)
    return outputs
