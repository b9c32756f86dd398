"""LOSSY: typical acceptance accepts the drafted tokens that the target considers probable enough.

The rule of Medusa (Cai et al. 2024): a token is accepted if p ≥ min(ε, δ · exp(−H)), where p is the target's
probability of it and H the entropy of the target's distribution, in nats. The longest accepted path is taken, and the
target's own decision follows it. Accepted tokens are plausible, but they are not samples of the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cluster.core.config.base import PluginSettings
from workers.sampling.acceptance import Accepted, DecidedTree, longest_path, register_rule


class TypicalSettings(PluginSettings):
    """LOSSY: which drafted tokens the target considers probable enough."""

    epsilon: Annotated[float, Field(gt=0, le=1)] = 0.09
    """LOSSY: a token of at least this probability is always accepted."""
    delta: Annotated[float, Field(gt=0, le=10)] = 0.3
    """LOSSY: a token is also accepted from the probability `delta` · exp(−entropy in nats) on."""


@dataclass(frozen=True, slots=True)
class Typical:
    """LOSSY: accepts tokens above a threshold that falls with the entropy. At temperature 0 it is `coupled`."""

    epsilon: float
    delta: float
    is_lossless: bool = False
    needs_distribution: bool = True

    def accept(self, step: DecidedTree) -> Accepted:
        if step.root.is_greedy:
            return step.walk()
        logs = step.known_log_probabilities  # [nodes + 1, vocab]
        probabilities = logs.exp()
        entropies = -(probabilities * logs).nan_to_num(nan=0.0).sum(dim=1)  # 0 · −inf is NaN
        thresholds = (self.delta * (-entropies).exp()).clamp(max=self.epsilon)
        is_typical = [
            0.0 < float(probabilities[parent + 1, token]) >= float(thresholds[parent + 1])
            for token, parent in zip(step.tree.tokens, step.tree.parents, strict=True)
        ]
        return step.accepted(longest_path(step.tree, is_typical))


@register_rule("typical", TypicalSettings)
def create_typical(settings: TypicalSettings) -> Typical:
    """Create the rule `typical`."""
    return Typical(settings.epsilon, settings.delta)
