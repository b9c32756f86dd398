"""A drafting module's passes over windows of recurring sizes, as CUDA graphs (`workers.forward.captured_passes`).

They are captured when the module is loaded: before the first request, and before the target's pool takes what memory
is left. Modules draft on one rank, and nothing in their passes waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from cluster.core.config.target_section import TargetSection
from workers.draft.common.modules.context_window import ContextShape
from workers.forward.captured_passes import CapturedPasses, CudaGraphCapture, GraphCapture
from workers.forward.graph_sizes import LONGEST, DraftingSize, smallest_drafting_graph
from workers.forward.window_attention import WindowAttention, WindowBuffers, WindowRows

Compute = Callable[[WindowBuffers, Hashable], Sequence[Tensor]]
"""Computes a part of a pass from its buffers."""


class CapturedWindows:
    """The captured passes of one module. Not thread-safe."""

    def __init__(
        self, compute: Compute, windows: WindowAttention, shape: ContextShape, width: int, capture: GraphCapture
    ) -> None:
        """Each token of a pass reads a feature of `width` numbers. Where its tokens see more than 32,768 slots on
        average, a pass runs without a graph.
        """
        slots = min(shape.window + shape.scratch, LONGEST)

        def make(size: DraftingSize) -> WindowBuffers:
            first = next(iter(self.passes.captured.values()), None)
            larger = None if first is None else first.inputs
            buffers = WindowBuffers(size, windows, (shape.layers, slots, width), larger)
            buffers.fill(WindowRows((), (), (), ()))
            return buffers

        self.passes: CapturedPasses[DraftingSize, Hashable, WindowBuffers] = CapturedPasses(make, compute, capture)

    def run(self, part: Hashable, features: Tensor, rows: WindowRows) -> tuple[Tensor, ...] | None:
        """Replay a pass. Returns its outputs, and behind them those of padding, valid until the next pass.

        `features` are float32 `[features, width]`, at most as many as tokens. `None`: the pass fits no captured graph.
        """
        size = smallest_drafting_graph(self.passes.sizes(part), len(rows.pieces), len(rows.positions))
        if size is None:
            return None
        captured = self.passes.captured[size, part]
        if not captured.inputs.fill(rows):
            return None
        if features.numel():
            captured.inputs.features[: len(features)].copy_(features)
        captured.replay()
        return captured.outputs


def capture_of(device: torch.device, target: TargetSection) -> GraphCapture | None:
    """What captures the passes of a module on this device; `None` where they are launched kernel by kernel."""
    return CudaGraphCapture(device) if device.type == "cuda" and target.compile != "off" else None
