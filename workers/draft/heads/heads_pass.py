"""The pass of Medusa heads for serving: few products for all rows and depths, with the results of `MedusaHeads`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.product import MakeProduct, Product
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.draft.common.modules.served_module import ServedModule
from workers.model.drafting.ends import rms_norm
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.selector import Selector
from workers.sampling.context import DecisionContext


class ParallelHeads:
    """The weights of trained heads, packed for the device, and the ranking of their candidates."""

    def __init__(self, module: MedusaHeads, loaded: ServedModule[Any]) -> None:
        ends, make = loaded.ends, loaded.make
        self.depths = module.shape.depths
        self.hidden_size = ends.hidden_size
        self.vocabulary_size = len(ends.embedding)
        self._embedding, self._epsilon = ends.embedding, ends.epsilon
        self._norm = None if ends.norm is None else ends.norm.float()
        self._make = make
        self._mix = None if module.mix is None else _mix_of(module.mix, make)
        self._heads = make(module.weights)
        self._ranker = PathRanker(ends, module.selector, make, loaded.shortlist)

    def with_weights(self, module: MedusaHeads) -> ParallelHeads:
        """Heads that compute with the weights of `module`, but with this selector, and share what is the target's."""
        other = copy(self)
        other._mix = None if module.mix is None else _mix_of(module.mix, self._make)
        other._heads = self._make(module.weights)
        return other

    @torch.inference_mode()
    def rank(
        self, taps: Sequence[Tensor], last: Sequence[int], contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        """Rank the candidates after each row's last token.

        `taps` are the rows' residual streams after the last layer, [hidden size] each, at the position before the last
        token; `contexts` [rows x depths] are those of the decisions at each depth, at most `self.depths`.
        """
        hidden = torch.stack(tuple(taps)).to(self._embedding.device).float()
        if self._norm is not None:
            hidden = rms_norm(hidden, self._norm, self._epsilon)
        if self._mix is not None:
            inner, outer = self._mix
            hidden = hidden + outer(silu(inner(torch.cat([hidden, self._embedding[list(last)].float()], dim=1))))
        rows, size = hidden.shape
        deep = silu(self._heads(hidden)).view(rows, self.depths, size)[:, : len(contexts) // rows]
        return self._ranker.rank(hidden.unsqueeze(1) + deep, contexts, siblings)


def _mix_of(mix: Selector, make: MakeProduct) -> tuple[Product, Product]:
    return make(mix.inner.weight), make(mix.outer.weight)
