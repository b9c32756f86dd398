"""Rejection sampling: accepts a drafted token with probability min(1, p / q).

The rule of Leviathan et al. 2023 and Chen et al. 2023 for chains. In trees, siblings are tried one after another, each
against what the earlier ones left of the target's distribution (recursive rejection without replacement: SpecInfer,
Miao et al. 2024; RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024).

The output has the target's own distribution, but it is not the text of plain decoding with the same seed. Two
conditions:

- The drafter states the distribution that it really draws from. A token without a distribution is deterministic: it is
  accepted with probability p. Any choice of such tokens keeps the output exact, because the rule's random numbers are
  independent of the noise that they may have been chosen with.
- Where tokens are drawn, whether a node is verified depends on its depth, on its rank among its siblings and on the
  tokens above it, never on its own token. If improbable tokens were left out, the probable ones would be too frequent
  in the output. A drafter that draws therefore proposes a fixed number of siblings at each depth and sends no
  `probabilities`, so that the coordinator chooses nodes by depth and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.core.config.base import PluginSettings
from cluster.core.tree import ROOT
from workers.sampling.acceptance import Accepted, DecidedTree, DrawnDrafts, accept_alone, register_rule
from workers.sampling.uniform import uniform

if TYPE_CHECKING:
    from torch import Tensor

    from workers.sampling.residual import Weights
    from workers.transfer import HostCopies


@dataclass(frozen=True, slots=True)
class Rejection:
    """Accepts drafted tokens by recursive rejection sampling. At temperature 0 it is the rule `coupled`."""

    is_lossless: bool = True
    needs_distribution: bool = True

    def accept(self, step: DecidedTree) -> Accepted:
        return accept_alone(self, step)

    def launch(
        self, steps: Sequence[DecidedTree], log_probabilities: Tensor | None, copies: HostCopies
    ) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
        """Accept or reject siblings in turn.

        The random numbers depend on (seed, position, rank among siblings) alone.
        """
        from workers.sampling.residual import launch_draws

        return launch_draws(steps, log_probabilities, copies, _walk)


def _walk(step: DecidedTree, target_after: Callable[[int], Weights]) -> tuple[list[int], Weights, float]:
    """The accepted nodes, what is left of the target's distribution after them, and the number to draw from it with."""
    nodes: list[int] = []
    while True:
        node, position = nodes[-1] if nodes else ROOT, step.root.position + len(nodes)
        child, left = _try_children(step, node, target_after(node), position)
        if child is None:
            return nodes, left, uniform(b"residual", step.root.seed, position)
        nodes.append(child)


def _try_children(step: DecidedTree, node: int, target: Weights, position: int) -> tuple[int | None, Weights]:
    """The accepted child of `node`, or `None`; and what the rejections leave of the target's distribution there.

    `position` is that of the children.
    """
    from workers.sampling.residual import draft_probabilities

    tree, seed = step.tree, step.root.seed
    rejected: list[int] = []
    for rank, child in enumerate(tree.children(node)):
        token = tree.tokens[child]
        draft = draft_probabilities(tree, child, step.distributions, rejected)
        rejected.append(token)
        if token not in draft:
            continue  # the drafter cannot have drawn it
        if uniform(b"rejection", seed, position, rank) * draft[token] < target.named.get(token, 0.0):
            return child, target
        left = target.without(draft)
        if left.total > 0.0:  # else the distributions are equal, and only rounding led to a rejection
            target = left.times(1.0 / left.total)
    return None, target


@register_rule("rejection", PluginSettings, DrawnDrafts.TREE)
def create_rejection(settings: PluginSettings) -> Rejection:  # noqa: ARG001 - the rule has no settings
    """Create the rule `rejection`."""
    return Rejection()
