"""The pass of Hydra heads (Ankner et al. 2024): each depth reads the tokens that were drafted before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from workers.draft.common.modules.product import MakeProduct, Product
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.draft.common.modules.served_module import ServedModule
from workers.draft.common.modules.slot_ranking import rank_slots
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import HydraShape
from workers.sampling.context import DecisionContext
from workers.transfer import tensor_on

_Affine = tuple[Product, Tensor]
"""A product with a matrix, and the bias that is added to it."""


class HydraHeads:
    """The weights of all heads, packed for the device. The head of depth i predicts position n + i after n tokens."""

    def __init__(self, module: PublicModule, loaded: ServedModule[Any]) -> None:
        shape, ends = module.shape, loaded.ends
        if not isinstance(shape, HydraShape):
            raise TypeError(f"{type(shape).__name__} is no shape of Hydra heads")
        self.depths, self.hidden_size, self.vocabulary_size = shape.depths, shape.hidden_size, len(ends.embedding)
        self._ends, self._shortlist = ends, loaded.shortlist

        def affine(name: str, make: MakeProduct = loaded.make) -> _Affine:
            return make(module.tensors[f"{name}.weight"]), module.tensors[f"{name}.bias"].float()

        depths, makes = range(shape.depths), [loaded.make_entry, *[loaded.make] * (shape.blocks - 1)]
        self._residual = [affine(f"{depth}.0.res_connection", loaded.make_entry) for depth in depths]
        self._blocks = [
            [affine(f"{depth}.{block}.linear", make) for block, make in enumerate(makes)] for depth in depths
        ]
        self._outputs = [affine(f"{depth}.head") for depth in depths]

    @torch.inference_mode()
    def rank(
        self, taps: Sequence[Tensor], last: Sequence[int], contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        states = self._ends.final_states(torch.stack(tuple(taps)))
        tokens = tensor_on(states.device, list(last), torch.int64)
        return rank_slots(_Slots(self, states), self._shortlist, tokens, contexts, siblings)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens, float32 [..., hidden size]."""
        return self._ends.embedding[tokens].float()

    def logits(self, depth: int, inputs: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of a head, of states and embeddings [rows, (depth + 2) x hidden size]."""
        first, *others = self._blocks[depth]
        rows = _apply(self._residual[depth], inputs) + silu(_apply(first, inputs))
        for block in others:
            rows = rows + silu(_apply(block, rows))
        return _apply(self._outputs[depth], rows)


class _Slots:
    """The depths of some rows; see `Slots`."""

    def __init__(self, heads: HydraHeads, states: Tensor) -> None:
        """`states` [rows, hidden size] are the target's, after its final norm."""
        self._heads = heads
        self._inputs = states.unsqueeze(1)
        """[rows, parents, inputs]: the state, and the embeddings of the path to each parent."""

    def logits(self, depth: int, previous: Tensor) -> Tensor:
        self._inputs = torch.cat([self._inputs, self._heads.embedded(previous)], dim=2)
        return self._heads.logits(depth, self._inputs.flatten(0, 1)).view(*previous.shape, -1)

    def confidences(self, found: Tensor) -> Tensor:
        return found

    def follow(self, origins: Tensor) -> None:
        self._inputs = self._inputs.gather(1, origins.unsqueeze(2).expand(-1, -1, self._inputs.shape[2]))


def _apply(affine: _Affine, rows: Tensor) -> Tensor:
    multiply, bias = affine
    return multiply(rows.contiguous()) + bias
