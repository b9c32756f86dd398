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

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.core.config.base import PluginSettings
from cluster.core.tree import ROOT
from workers.sampling.acceptance import Accepted, DecidedTree, DrawnDrafts, register_rule
from workers.sampling.uniform import uniform

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rejection:
    """Accepts drafted tokens by recursive rejection sampling. At temperature 0 it is the rule `coupled`."""

    is_lossless: bool = True
    needs_distribution: bool = True

    def accept(self, step: DecidedTree) -> Accepted:
        """Accept or reject siblings in turn.

        The random numbers depend on (seed, position, rank among siblings) alone.
        """
        if step.root.is_greedy:
            return step.walk()
        targets = step.known_log_probabilities
        nodes: list[int] = []
        while True:
            node = nodes[-1] if nodes else ROOT
            child, last = _try_children(step, node, targets[node + 1], step.root.position + len(nodes))
            if child is None:
                return step.accepted(nodes, last)
            nodes.append(child)


def _try_children(step: DecidedTree, node: int, log_probabilities: Tensor, position: int) -> tuple[int | None, int]:
    """The accepted child of `node`, or `None` and the token that is drawn instead (-1 if none can be drawn).

    `log_probabilities` [vocab] are the target's after `node`, and `position` is that of the children.
    """
    from workers.sampling.residual import draft_probabilities, draw, residual

    tree, seed = step.tree, step.root.seed
    target = log_probabilities.double().exp()  # what the rejections so far leave, normalised
    rejected: list[int] = []
    for rank, child in enumerate(tree.children(node)):
        token = tree.tokens[child]
        draft = draft_probabilities(tree, child, step.distributions, rejected)
        rejected.append(token)
        if token not in draft:
            continue  # the drafter cannot have drawn it
        if uniform(b"rejection", seed, position, rank) * draft[token] < float(target[token]):
            return child, token
        left = residual(target, draft)
        mass = float(left.sum())
        if mass > 0.0:  # else the distributions are equal, and only rounding led to a rejection
            target = left / mass
    return None, draw(target, uniform(b"residual", seed, position))


@register_rule("rejection", PluginSettings, DrawnDrafts.TREE)
def create_rejection(settings: PluginSettings) -> Rejection:  # noqa: ARG001 - the rule has no settings
    """Create the rule `rejection`."""
    return Rejection()
