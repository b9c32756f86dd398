"""The default rule: a drafted token is accepted when it is the target's own decision at its position.

The target's decision is a sample by the Gumbel-max trick with noise that depends on (seed, position, token). The
accepted text is therefore the same as without drafts (drafter-invariant speculative decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.core.config.base import PluginSettings
from cluster.core.drafting import DraftDistribution
from cluster.core.tree import ROOT, TokenTree
from workers.sampling.acceptance import Accepted, RootPosition, check_decisions, register_rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Coupled:
    """Accepts the drafted tokens that equal the target's own decisions."""

    is_lossless: bool = True
    needs_distribution: bool = False

    def accept(
        self,
        tree: TokenTree,
        decisions: Sequence[int],
        root: RootPosition,  # noqa: ARG002 - part of the interface
        log_probabilities: Tensor | None = None,  # noqa: ARG002 - part of the interface
        distributions: Sequence[DraftDistribution] = (),  # noqa: ARG002 - part of the interface
    ) -> Accepted:
        return walk(tree, decisions)


def walk(tree: TokenTree, decisions: Sequence[int]) -> Accepted:
    """Descend while the decision is among the children; the last decision is the token after the path.

    Raises `ValueError` unless there is one decision for the root and one for each node.
    """
    check_decisions(tree, decisions)
    nodes: list[int] = []
    tokens = [decisions[0]]
    node = tree.child(ROOT, tokens[-1])
    while node is not None:
        nodes.append(node)
        tokens.append(decisions[node + 1])
        node = tree.child(node, tokens[-1])
    return Accepted(tuple(nodes), tuple(tokens))


@register_rule("coupled", PluginSettings)
def create_coupled(settings: PluginSettings) -> Coupled:  # noqa: ARG001 - the rule has no settings
    """Create the rule `coupled`."""
    return Coupled()
