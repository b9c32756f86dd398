"""Tree sizes by goodput: the trees that commit the most tokens per second, down to none at all.

Goodput is the number of tokens that a round is expected to commit ÷ the time that it is expected to take (SmartSpec,
Liu et al. 2024). A node is worth verifying if the probability that it is accepted raises the quotient. No node is more
probable than its parent, so the most probable nodes of a tree form a tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.core.drafting import DraftBudget
from cluster.speculation.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class DraftForecast:
    """The expected draft tree of one sequence, before the drafter proposes it."""

    probabilities: tuple[float, ...]
    """Acceptance probabilities of the best nodes, never rising; at most as many as the tree may have nodes."""
    depths: tuple[int, ...]
    """Depth of the tree that consists of the best nodes up to each one, in tokens; never falling."""
    max_depth: int
    """Depth of the deepest tree allowed, in tokens."""


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The number of nodes to request for each sequence, and the expected goodput."""

    nodes: tuple[int, ...]
    """One count per forecast."""
    goodput: float
    """Expected tokens per second with these trees."""
    plain_goodput: float
    """Expected tokens per second without drafts."""

    @property
    def speedup(self) -> float:
        """Expected goodput ÷ expected goodput of plain decoding."""
        return self.goodput / self.plain_goodput


def size_trees(
    forecasts: Sequence[DraftForecast], step_latency: LatencyModel, propose_latency: LatencyModel, rows: int = 0
) -> TreeSizes:
    """Size the trees of one round: the most probable nodes of all sequences first, up to the highest goodput.

    `rows` is how many sequences decide in the same step, at least one per forecast. The wait for proposals grows with
    the number of sequences that are drafted for and with the depth of their deepest tree.
    """
    rows = max(rows, len(forecasts))
    ranked = sorted(
        (
            (probability, -rank, index)
            for index, forecast in enumerate(forecasts)
            for rank, probability in enumerate(forecast.probabilities)
        ),
        reverse=True,
    )
    plain_goodput = rows / step_latency.seconds(rows, rows)
    best_goodput, best_count = plain_goodput, 0
    seconds = step_latency.seconds_upto(rows, rows, rows + len(ranked))
    expected, asked, depth, wait = float(rows), set[int](), 0, 0.0
    for count, (probability, rank, index) in enumerate(ranked, start=1):
        expected += probability
        node_depth = min(forecasts[index].depths[-rank], forecasts[index].max_depth)
        if index not in asked or node_depth > depth:
            asked.add(index)
            depth = max(depth, node_depth)
            wait = propose_latency.seconds(len(asked), depth)
        goodput = expected / (wait + seconds[count])
        if goodput > best_goodput:
            best_goodput, best_count = goodput, count
    nodes = [0] * len(forecasts)
    for _, _, index in ranked[:best_count]:
        nodes[index] += 1
    return TreeSizes(tuple(nodes), best_goodput, plain_goodput)


def budget_for(nodes: int, depth: int) -> DraftBudget:
    """Return the budget to request for `nodes` wanted nodes: half as many more to choose from, and no deeper tree."""
    return DraftBudget(nodes + max(1, nodes // 2), depth)


@dataclass(frozen=True, slots=True)
class PrunedTrees:
    """The nodes of each draft tree that are worth verifying, with the expected result of the step."""

    nodes: tuple[tuple[int, ...], ...]
    """The kept nodes of each tree, ascending."""
    expected: float
    """Tokens that the round is expected to commit."""
    seconds: float
    """Time that its step is expected to take, in seconds."""


def prune_trees(
    trees: Sequence[Sequence[float]],
    step_latency: LatencyModel,
    rows: int,
    tokens: int,
    waited: float,
    whole: Collection[int] = (),
) -> PrunedTrees:
    """Keep the nodes that raise goodput.

    `trees` holds each node's acceptance probability, parents before children and never below them. `rows` sequences
    decide in a step that has `tokens` tokens without trees. `waited` seconds of the round have passed. The time that
    prompts take in the step is not counted: they must be computed in any case, and every draft would seem cheap. Trees
    whose indices are in `whole` are kept with all their nodes or none.
    """
    parts = _ranked_parts(trees, whole)
    most = sum(map(len, trees))
    seconds = step_latency.seconds_upto(rows, tokens, tokens + most)
    waited -= seconds[0] - step_latency.seconds(rows, rows) if tokens > rows else 0.0
    expected = best_expected = float(rows)
    best_goodput, best_parts, best_count, count = expected / (waited + seconds[0]), 0, 0, 0
    for number, (_, index, nodes) in enumerate(parts, start=1):
        expected += sum(trees[index][node] for node in nodes)
        count += len(nodes)
        goodput = expected / (waited + seconds[count])
        if goodput > best_goodput:
            best_goodput, best_parts, best_count, best_expected = goodput, number, count, expected
    kept: list[list[int]] = [[] for _ in trees]
    for _, index, nodes in parts[:best_parts]:
        kept[index] += nodes
    return PrunedTrees(tuple(tuple(sorted(nodes)) for nodes in kept), best_expected, seconds[best_count])


def _ranked_parts(trees: Sequence[Sequence[float]], whole: Collection[int]) -> list[tuple[float, int, range]]:
    """Minus the mean probability, the tree and the nodes of each part: a node, or a whole tree. The best come first."""
    parts = [
        (-probability, node, index, range(node, node + 1))
        for index, probabilities in enumerate(trees)
        if index not in whole
        for node, probability in enumerate(probabilities)
    ]
    parts += [
        (-sum(trees[index]) / len(trees[index]), 0, index, range(len(trees[index]))) for index in whole if trees[index]
    ]
    return [(negative, index, nodes) for negative, _, index, nodes in sorted(parts, key=lambda part: part[:3])]
