"""LOSSY unless strict: the acceptance criteria of blockwise parallel decoding.

The rule of Stern et al. 2018. A drafted token is accepted if it is the target's decision, if it is among the target's
`top_k` most probable tokens, or if it differs from the decision by at most `distance`, which is meaningful where token
numbers have an order (pixels, notes). At least `minimum_block` tokens are committed per step. The longest accepted path
is taken, and the target's own decision follows it. With the default settings the rule is strict: it is `coupled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cluster.core.config.base import PluginSettings
from cluster.core.tree import ROOT
from workers.sampling.acceptance import Accepted, DecidedTree, accept_alone, longest_path, register_rule

if TYPE_CHECKING:
    from torch import Tensor

    from workers.transfer import HostCopies


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
        return accept_alone(self, step)

    def launch(
        self, steps: Sequence[DecidedTree], log_probabilities: Tensor | None, copies: HostCopies
    ) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
        found = None
        if self.top_k > 1 and steps:
            for step in steps:
                step.check_log_probabilities()
            if log_probabilities is not None:
                best = log_probabilities.topk(min(self.top_k, log_probabilities.shape[1]), dim=1)
                found = copies.add(best.indices), copies.add(best.values)

        def accepted(decided: Sequence[DecidedTree]) -> list[Accepted]:
            tokens, values = ([], []) if found is None else (read().tolist() for read in found)
            paths, first = list[Accepted](), 0
            for step in decided:
                rows = range(first, first + len(step.decisions)) if found is not None else range(0)
                first += len(step.decisions)
                paths.append(self._accepted(step, [_possible(tokens[row], values[row]) for row in rows]))
            return paths

        return accepted

    def _accepted(self, step: DecidedTree, close: Sequence[set[int]]) -> Accepted:
        """Accept the longest path of close nodes, then the forced ones: first children below that path.

        `close` are the most probable tokens at each decision, or nothing.
        """
        tree, decisions = step.tree, step.decisions
        is_close = [
            decisions[parent + 1] >= 0
            and (abs(token - decisions[parent + 1]) <= self.distance or (bool(close) and token in close[parent + 1]))
            for token, parent in zip(tree.tokens, tree.parents, strict=True)
        ]
        nodes = longest_path(tree, is_close)
        while len(nodes) < self.minimum_block - 1:
            children = tree.children(nodes[-1] if nodes else ROOT)
            if not children:
                break
            nodes = (*nodes, children[0])
        return step.accepted(nodes)


def _possible(tokens: Sequence[int], values: Sequence[float]) -> set[int]:
    """The tokens whose log-probability is not −inf."""
    return {token for token, value in zip(tokens, values, strict=True) if value > -math.inf}


@register_rule("blockwise", BlockwiseSettings)
def create_blockwise(settings: BlockwiseSettings) -> Blockwise:
    """Create the rule `blockwise`."""
    return Blockwise(settings.top_k, settings.distance, settings.minimum_block)
