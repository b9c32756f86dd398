"""The pass of Medusa heads of public checkpoints: each has blocks of its own, and mostly its own output head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.served_module import ServedModule
from workers.draft.heads.parallel_pass import ParallelPass
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import MedusaShape


class OwnHeads(ParallelPass):
    """The weights of all heads, packed for the device. The head of depth i predicts position n + i after n tokens."""

    def __init__(self, module: PublicModule, loaded: ServedModule[Any]) -> None:
        shape = module.shape
        if not isinstance(shape, MedusaShape):
            raise TypeError(f"{type(shape).__name__} is no shape of Medusa heads")
        ends = loaded.ends
        self.depths, self.hidden_size, self.vocabulary_size = shape.depths, shape.hidden_size, len(ends.embedding)
        self._ends, self.device = ends, ends.embedding.device
        self._blocks = [
            [
                (loaded.make(module.tensors[f"{depth}.{block}.weight"]), module.get(f"{depth}.{block}.bias"))
                for block in range(shape.blocks)
            ]
            for depth in range(shape.depths)
        ]
        own = [module.get(f"{depth}.head.weight") for depth in range(shape.depths)]
        self._outputs = [loaded.make(one) for one in own if one is not None]
        self.ranker = PathRanker(ends, None, loaded.make, loaded.shortlist)

    def computed(
        self,
        states: Tensor,
        last: Tensor,  # noqa: ARG002 - plain Medusa does not read the last token
        depths: int,
    ) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(states, depths)
        return hidden, self.logits(hidden).flatten(0, 1) if self._outputs else self.ranker.logits(hidden)

    def hidden(self, taps: Sequence[Tensor], depths: int) -> Tensor:
        """Vectors for the output heads [rows, depths, hidden size] of residual streams, [hidden size] each."""
        return self._hidden(torch.stack(tuple(taps)), depths)

    def _hidden(self, taps: Tensor, depths: int) -> Tensor:
        states, found = self._ends.final_states(taps), []
        for blocks in self._blocks[:depths]:
            rows = states
            for multiply, bias in blocks:
                inner = multiply(rows)
                rows = rows + silu(inner if bias is None else inner + bias.float())
            found.append(rows)
        return torch.stack(found, dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, depths, draft vocabulary] of own output heads."""
        products = zip(self._outputs, hidden.unbind(dim=1), strict=False)
        return torch.stack([multiply(rows) for multiply, rows in products], dim=1)
