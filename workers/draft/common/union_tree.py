"""The union of several methods' draft trees, and how often the target takes its nodes.

The probability of a node is learned separately for each set of methods that propose it, and for each bin of the
probability that they give it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import Proposal
from cluster.core.tree import ROOT, TokenTree

_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Edges between the bins of the probability that methods give to a node, on condition of its parent."""
_PRIOR_WEIGHT = 8.0
"""Weight of the methods' own estimate, in observations."""
_DECAY = 0.998
"""Factor by which each observation reduces the weight of earlier ones."""
_FIRST_PRIOR, _LATER_PRIOR = 0.5, 0.1
"""Estimates for a first child and for its siblings, where a method sends no probabilities."""

_Key = tuple[int, int]
"""The set of methods that propose a node, one bit each, and the bin of its estimate."""


class TakenRates:
    """How often the target takes nodes of each key."""

    def __init__(self) -> None:
        self._hits: dict[_Key, float] = {}
        self._trials: dict[_Key, float] = {}

    def probability(self, key: _Key, estimate: float) -> float:
        """The learned probability; `estimate` holds until there are observations."""
        hits, trials = self._hits.get(key, 0.0), self._trials.get(key, 0.0)
        return (_PRIOR_WEIGHT * estimate + hits) / (_PRIOR_WEIGHT + trials)

    def observe(self, key: _Key, *, hit: bool) -> None:
        """Record whether the target took a node of this key."""
        self._hits[key] = self._hits.get(key, 0.0) * _DECAY + hit
        self._trials[key] = self._trials.get(key, 0.0) * _DECAY + 1.0

    def estimate(self, root: UnionNode) -> None:
        """Set the key and the path probability of every node below `root`."""
        stack = [root]
        while stack:
            node = stack.pop()
            found: dict[int, float] = {}
            for token, child in node.children.items():
                child.key, estimate = child.key_and_estimate()
                found[token] = self.probability(child.key, estimate)
            scale = node.probability / max(1.0, sum(found.values()))
            for token, child in node.children.items():
                child.probability = found[token] * scale
                stack.append(child)


@dataclass(slots=True, eq=False)
class UnionNode:
    """A node of the union."""

    children: dict[int, UnionNode] = field(default_factory=dict)
    estimates: dict[int, float] = field(default_factory=dict)
    """Probability on condition of the parent, by number of the method."""
    origin: DraftOrigin = DraftOrigin.TRAINED
    """The first of the methods' origins, in the order request, earlier answers, trained draft."""
    is_required: bool = False
    is_chosen: bool = False
    """Whether the proposal has the node."""
    key: _Key = (0, 0)
    probability: float = 1.0
    """Probability of the path from the root."""

    def key_and_estimate(self) -> tuple[_Key, float]:
        """The key, and the methods' common estimate: the probability that not all of them are wrong."""
        wrong = 1.0
        methods = 0
        for method, estimate in self.estimates.items():
            wrong *= 1.0 - estimate
            methods |= 1 << method
        estimate = 1.0 - wrong
        return (methods, sum(estimate > edge for edge in _EDGES)), estimate


def add_tree(root: UnionNode, method: int, proposal: Proposal) -> None:
    """Add the tree of one method to the union."""
    tree, probabilities, origins = proposal.tree, proposal.probabilities, proposal.node_origins
    nodes: list[UnionNode] = []
    has_child: set[int] = set()
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = root if parent == ROOT else nodes[parent]
        node = above.children.setdefault(token, UnionNode())
        nodes.append(node)
        if probabilities:
            whole = 1.0 if parent == ROOT else probabilities[parent]
            estimate = probabilities[index] / whole if whole > 0.0 else 0.0
        else:
            estimate = _LATER_PRIOR if parent in has_child else _FIRST_PRIOR
        has_child.add(parent)
        node.estimates[method] = min(0.999, estimate)
        node.is_required |= not proposal.is_prunable
        node.origin = min(node.origin, origins[index])


def choose_nodes(
    root: UnionNode, max_nodes: int, max_depth: int
) -> tuple[TokenTree, tuple[float, ...], tuple[DraftOrigin, ...]]:
    """The required nodes and the most probable others, best first, within the budget, and per node its path probability
    and its origin. No child precedes its parent."""
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    origins: list[DraftOrigin] = []
    frontier = [(child, token, ROOT, 1) for token, child in root.children.items()]
    while frontier and len(tokens) < max_nodes:
        best = max(frontier, key=lambda entry: (entry[0].is_required, entry[0].probability))
        frontier.remove(best)
        node, token, parent, depth = best
        if depth > max_depth:
            continue
        node.is_chosen = True
        tokens.append(token)
        parents.append(parent)
        probabilities.append(node.probability)
        origins.append(node.origin)
        index = len(tokens) - 1
        frontier.extend((child, below, index, depth + 1) for below, child in node.children.items())
    return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities), tuple(origins)
