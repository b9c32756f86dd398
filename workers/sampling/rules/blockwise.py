"""LOSSY unless strict: the acceptance criteria of blockwise parallel decoding.

The rule of Stern et al. 2018. A drafted token is accepted if it is the target's decision, if it is among the target's
`top_k` most probable tokens, or if it differs from the decision by at most `distance`, which is meaningful where token
numbers have an order (pixels, notes). At least `minimum_block` tokens are committed per step. The longest accepted path
is taken, and the target's own decision follows it. With the default settings the rule is strict: it is `coupled`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cluster.core.config.base import PluginSettings
from cluster.core.tree import ROOT
from workers.sampling.acceptance import Accepted, DecidedTree, longest_path, register_rule


class BlockwiseSettings(PluginSettings):
    """LOSSY unless all settings have their defaults: which drafted tokens are close enough to the target's decision."""

    top_k: Annotated[int, Field(ge=1, le=64)] = 1
    """LOSSY above 1: a token among this many most probable tokens of the target is accepted."""
    distance: Annotated[int, Field(ge=0)] = 0
    """LOSSY above 0: a token is accepted if it differs from the target's decision by at most this number."""
    minimum_block: Annotated[int, Field(ge=1, le=64)] = 1
    """LOSSY above 1: tokens that a step commits at least, as far as the draft has them, whatever the target decides.
    The last one is the target's own decision."""


@dataclass(frozen=True, slots=True)
class Blockwise:
    """LOSSY unless strict: accepts drafted tokens that are close to the target's decision."""

    top_k: int = 1
    distance: int = 0
    minimum_block: int = 1

    @property
    def is_lossless(self) -> bool:
        """Whether the criteria are strict: they accept decisions only."""
        return (self.top_k, self.distance, self.minimum_block) == (1, 0, 1)

    @property
    def needs_distribution(self) -> bool:
        return self.top_k > 1

    def accept(self, step: DecidedTree) -> Accepted:
        """Accept the longest path of close nodes, then the forced ones: first children below that path."""
        tree, decisions = step.tree, step.decisions
        close = self._most_probable(step)
        is_close = [
            decisions[parent + 1] >= 0
            and (abs(token - decisions[parent + 1]) <= self.distance or token in close.get(parent + 1, ()))
            for token, parent in zip(tree.tokens, tree.parents, strict=True)
        ]
        nodes = longest_path(tree, is_close)
        while len(nodes) < self.minimum_block - 1:
            children = tree.children(nodes[-1] if nodes else ROOT)
            if not children:
                break
            nodes = (*nodes, children[0])
        return step.accepted(nodes)

    def _most_probable(self, step: DecidedTree) -> dict[int, set[int]]:
        """The `top_k` most probable tokens at the root (0) and at each node (`node + 1`); empty if `top_k` is 1."""
        if self.top_k == 1:
            return {}
        logs = step.known_log_probabilities
        best = logs.topk(min(self.top_k, logs.shape[1]), dim=1)
        return {
            row: {token for token, value in zip(tokens, values, strict=True) if value > -math.inf}
            for row, (tokens, values) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        }


@register_rule("blockwise", BlockwiseSettings)
def create_blockwise(settings: BlockwiseSettings) -> Blockwise:
    """Create the rule `blockwise`."""
    return Blockwise(settings.top_k, settings.distance, settings.minimum_block)
