"""Block verification: accepts a prefix of a drafted chain by a joint test of all its tokens.

The rule of Sun et al. 2024, "Block Verification Accelerates Speculative Decoding". On chains it never accepts fewer
tokens in expectation than `rejection`. In a tree, only the chain of first children is verified; other nodes are
ignored.

The output has the target's own distribution, but it is not the text of plain decoding with the same seed. The
conditions of `rejection` apply. In addition, a drafter that draws uses new random numbers in each round: this rule
reads tokens after the accepted prefix, so the same numbers would not be independent of its choice in the next round.
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
class Block:
    """Accepts a prefix of the chain of first children. At temperature 0 it is the rule `coupled`."""

    is_lossless: bool = True
    needs_distribution: bool = True

    def accept(self, step: DecidedTree) -> Accepted:
        return accept_alone(self, step)

    def launch(
        self, steps: Sequence[DecidedTree], log_probabilities: Tensor | None, copies: HostCopies
    ) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
        """Accept the longest block.

        The random numbers depend on (seed, position of the root, depth) alone.
        """
        from workers.sampling.residual import launch_draws

        return launch_draws(steps, log_probabilities, copies, _walk)


def _walk(step: DecidedTree, target_after: Callable[[int], Weights]) -> tuple[list[int], Weights, float]:
    """The accepted nodes, what is left of the target's distribution after them, and the number to draw from it with."""
    from workers.sampling.residual import draft_probabilities

    tree, root = step.tree, step.root
    chain: list[int] = []
    while children := tree.children(chain[-1] if chain else ROOT):
        chain.append(children[0])
    joint = 1.0  # min(1, p / q) of the tokens so far together: the probability that at least these are accepted
    accepted, left = 0, target_after(ROOT)
    for depth, node in enumerate((ROOT, *chain)):
        target = target_after(node)
        draft = draft_probabilities(tree, chain[depth], step.distributions) if depth < len(chain) else {}
        # What the token after this prefix is drawn from if the prefix is accepted and nothing longer.
        weights = target.times(joint).without(draft) if draft else target
        mass = weights.total
        threshold = mass / (mass + 1.0 - joint) if draft and mass > 0.0 else joint if not draft else 0.0
        if depth == 0 or uniform(b"block", root.seed, root.position, depth) < threshold:
            accepted, left = depth, weights if draft and mass > 0.0 else target
        if draft:
            token = tree.tokens[chain[depth]]
            proposed = draft.get(token, 0.0)
            joint = min(1.0, joint * target.named.get(token, 0.0) / proposed) if proposed > 0.0 else 0.0
    return chain[:accepted], left, uniform(b"block residual", root.seed, root.position)


@register_rule("block", PluginSettings, DrawnDrafts.CHAIN)
def create_block(settings: PluginSettings) -> Block:  # noqa: ARG001 - the rule has no settings
    """Create the rule `block`."""
    return Block()
