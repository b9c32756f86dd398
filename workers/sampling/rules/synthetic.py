"""NOT LOSSLESS, for experiments: accepts drafted tokens at random.

This measures the gain from a draft of a given quality and speed before such a draft is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from cluster.core.config.base import PluginSettings, Rate
from cluster.core.tree import ROOT
from workers.sampling.acceptance import Accepted, DecidedTree, RootPosition, register_rule
from workers.sampling.uniform import random_bits


class SyntheticRuleSettings(PluginSettings):
    """NOT LOSSLESS: the rates at which drafted tokens are accepted. The drafting method of the same name sets them."""

    renamed: ClassVar[dict[str, str]] = {"acceptance_rates": "rates"}

    rates: Annotated[tuple[Rate, ...], Field(max_length=64)] = ()
    """Probability that a drafted token is accepted, by depth from 1; the last value holds for all deeper tokens."""

    def check_selected(self) -> None:
        if not self.rates:
            raise ValueError("rates must hold at least one number")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """NOT LOSSLESS: accepts a drafted token at random, whatever the target decides.

    The probability at depth `d` (1 below the root) is `rates[d - 1]`; the last rate holds for all further depths. The
    draws and the synthetic drafter's tokens depend only on (seed, position), so every rank accepts the same path. With
    one rate, the text is also the same for every tree: where the walk leaves the tree, the next token is the one that
    the synthetic drafter would have drafted.
    """

    rates: tuple[float, ...]
    """Acceptance probabilities by depth, from 0 to 1; at least one."""
    is_lossless: bool = False
    needs_distribution: bool = False

    def accept(self, step: DecidedTree) -> Accepted:
        """Accept first children at random, then add one decided or synthetic token. See `AcceptanceRule`."""
        root = step.root
        nodes: list[int] = []
        node = ROOT
        while self._accepts(root, len(nodes)):
            child = next(iter(step.tree.children(node)), None)
            if child is None:
                token = synthetic_token(root.seed, root.position + len(nodes), root.vocabulary_size)
                return step.accepted(nodes, token)
            nodes.append(child)
            node = child
        return step.accepted(nodes)

    def _accepts(self, root: RootPosition, depth: int) -> bool:
        rate = self.rates[min(depth, len(self.rates) - 1)]
        return random_bits(b"acceptance", root.seed, root.position + depth) < rate * 2.0**64


@register_rule("synthetic", SyntheticRuleSettings)
def create_synthetic_rule(settings: SyntheticRuleSettings) -> Synthetic:
    """Create the rule `synthetic`."""
    return Synthetic(settings.rates)


def synthetic_token(seed: int, position: int, vocabulary_size: int) -> int:
    """The token that the synthetic drafter drafts at a position, whatever precedes it."""
    return random_bits(b"guess", seed, position) % vocabulary_size
