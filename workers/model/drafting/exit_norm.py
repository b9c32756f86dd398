"""Early exit: the target drafts with some of its own layers, and a norm makes their output ready for the head.

The layers are the first L (LayerSkip, Elhoushi et al. 2024) or all but a skip set (Draft & Verify, Zhang et al. 2024).
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.model.draft_shapes import ExitShape
from workers.model.drafting.ends import TargetEnds, rms_norm


class ExitNorm(nn.Module):
    """An RMS norm for the residual stream of an exit; without own weights it is the target's final norm."""

    def __init__(self, ends: TargetEnds, shape: ExitShape) -> None:
        super().__init__()
        self.shape = shape
        self.epsilon = ends.epsilon
        weight = ends.initial_norm()
        self.weight: Tensor
        if shape.has_norm:
            self.weight = nn.Parameter(weight.float())
        else:
            self.register_buffer("weight", weight, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden vectors [..., hidden size] for the head, of the residual stream after the exit's last layer."""
        return rms_norm(hidden, self.weight, self.epsilon)
