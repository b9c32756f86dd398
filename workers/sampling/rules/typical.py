"""LOSSY: typical acceptance accepts the drafted tokens that the target considers probable enough.

The rule of Medusa (Cai et al. 2024): a token is accepted if p ≥ min(ε, δ · exp(−H)), where p is the target's
probability of it and H the entropy of the target's distribution, in nats. The longest accepted path is taken, and the
target's own decision follows it. Accepted tokens are plausible, but they are not samples of the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cluster.core.config.base import PluginSettings
from workers.sampling.acceptance import Accepted, DecidedTree, accept_alone, longest_path, register_rule

if TYPE_CHECKING:
    from torch import Tensor

    from workers.transfer import HostCopies


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
        return accept_alone(self, step)

    def launch(
        self, steps: Sequence[DecidedTree], log_probabilities: Tensor | None, copies: HostCopies
    ) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
        from workers.sampling.row_sums import sums_by_halves
        from workers.transfer import to_device

        places: list[tuple[int, int]] = []  # the decision and the token of each drafted token
        first = 0
        for step in steps:
            if not step.root.is_greedy:
                step.check_log_probabilities()
                places += zip((first + parent + 1 for parent in step.tree.parents), step.tree.tokens, strict=True)
            first += len(step.tree) + 1
        found = None
        if log_probabilities is not None and places:
            probabilities = log_probabilities.exp()  # [decisions, vocab]
            informed = (probabilities * log_probabilities).nan_to_num_(nan=0.0)  # 0 · −inf is NaN
            entropies = -sums_by_halves(informed)
            thresholds = (self.delta * (-entropies).exp()).clamp(max=self.epsilon)
            rows, tokens = (to_device(column, thresholds.device) for column in zip(*places, strict=True))
            drafted = probabilities[rows, tokens]
            found = copies.add((drafted > 0.0) & (drafted >= thresholds[rows]))

        def walk(decided: Sequence[DecidedTree]) -> list[Accepted]:
            is_typical = iter([] if found is None else found().tolist())
            return [
                step.walk()
                if step.root.is_greedy
                else step.accepted(longest_path(step.tree, list(islice(is_typical, len(step.tree)))))
                for step in decided
            ]

        return walk


@register_rule("typical", TypicalSettings)
def create_typical(settings: TypicalSettings) -> Typical:
    """Create the rule `typical`."""
    return Typical(settings.epsilon, settings.delta)
