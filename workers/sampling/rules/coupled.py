"""The default rule: a drafted token is accepted when it is the target's own decision at its position.

The target's decision is a sample by the Gumbel-max trick with noise that depends on (seed, position, token). The
accepted text is therefore the same as without drafts (drafter-invariant speculative decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.config.base import PluginSettings
from workers.sampling.acceptance import Accepted, DecidedTree, register_rule


@dataclass(frozen=True, slots=True)
class Coupled:
    """Accepts the drafted tokens that equal the target's own decisions."""

    is_lossless: bool = True
    needs_distribution: bool = False

    def accept(self, step: DecidedTree) -> Accepted:
        return step.walk()


@register_rule("coupled", PluginSettings)
def create_coupled(settings: PluginSettings) -> Coupled:  # noqa: ARG001 - the rule has no settings
    """Create the rule `coupled`."""
    return Coupled()
