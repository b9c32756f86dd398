"""Draft trees from candidates of all depths: the most probable paths first."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.core.drafting import DraftBudget
from cluster.core.tree import ROOT, TokenTree
from workers.draft.common.trees.calibration import KINDS, Calibration, Kind

Shape = frozenset[tuple[int, ...]]
"""The nodes that a tree may have. A node is the ranks along its path: `(0, 1)` is the second child of the first one."""


MOST_PARENTS = 4
"""Most candidates of one depth that candidates follow, where the depths are ranked one after another."""


@dataclass(frozen=True, slots=True)
class TreeForm:
    """The form of the trees of a module that predicts all depths at once."""

    siblings: int
    """Most candidates below one node."""
    nodes: Shape | None = None
    """The nodes that a tree may have; `None`: any."""


@dataclass(frozen=True, slots=True)
class RankedPaths:
    """Candidates of one row at every depth, and their order below each candidate of the depth before."""

    tokens: Sequence[Sequence[int]]
    """[depths][candidates]."""
    order: Sequence[Sequence[Sequence[int]]]
    """[depths][candidates of the depth before][siblings]: indices of candidates, the most probable first. Depth 0 has
    one entry, and so has a depth whose order is the same below all of them."""
    confidences: Sequence[Sequence[Sequence[float]]]
    """Of the same shape: the module's own probability of each, given the candidate before."""

    def children(self, depth: int, parent: int) -> tuple[Sequence[int], Sequence[float]]:
        """Candidates at `depth` below the candidate `parent` of the depth before, and their confidences."""
        order, confidences = self.order[depth], self.confidences[depth]
        return (order[parent], confidences[parent]) if len(order) > 1 else (order[0], confidences[0])


class PathCalibration:
    """Turns confidences into probabilities that the target takes a token, for each depth on its own."""

    def __init__(self, depths: int) -> None:
        self._depths = [Calibration() for _ in range(depths)]

    def probabilities(self, depth: int, confidences: Sequence[float], kind: Kind) -> list[float]:
        """The probability that the target takes each candidate of a depth, in order of rank."""
        return self._depths[depth].probabilities(confidences, kind)

    def observe(self, ranked: RankedPaths, taken: Sequence[int], kind: Kind) -> bool:
        """Learn from the tokens that the target took after the row of `ranked`. `kind` is that of the first depth.

        Returns whether the last one was a first candidate of its depth.
        """
        parent, is_streak = 0, kind.is_streak
        for depth, token in enumerate(taken[: len(ranked.tokens)]):
            order, confidences = ranked.children(depth, parent)
            rank = next((rank for rank, one in enumerate(order) if ranked.tokens[depth][one] == token), None)
            self._depths[depth].observe(confidences, rank, KINDS[kind.is_greedy, is_streak])
            is_streak = rank == 0
            if rank is None:
                break
            parent = order[rank]
        return is_streak


def draft_paths(
    ranked: RankedPaths,
    budget: DraftBudget,
    calibration: PathCalibration,
    *,
    kind: Kind,
    ends: Collection[int] = (),
    shape: Shape | None = None,
) -> tuple[TokenTree, tuple[float, ...]]:
    """The tree of the most probable nodes within `budget`, best first, and the probability of the path to each.

    `kind` is that of the candidates at the first depth. With a `shape`, only its nodes. Nothing follows a token of
    `ends`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    serial = 0
    # Minus the path probability, a serial number that breaks ties, the candidate, the parent node and the ranks.
    heap: list[tuple[float, int, int, int, tuple[int, ...]]] = []

    def push_children(candidate: int, node: int, path: float, ranks: tuple[int, ...], is_first: bool) -> None:
        nonlocal serial
        depth = len(ranks)
        order, confidences = ranked.children(depth, candidate)
        estimates = calibration.probabilities(depth, confidences, KINDS[kind.is_greedy, is_first])
        for rank, child in enumerate(order):
            if confidences[rank] > 0.0 and (shape is None or (*ranks, rank) in shape):
                serial += 1
                heapq.heappush(heap, (-path * estimates[rank], serial, child, node, (*ranks, rank)))

    max_depth = min(budget.max_depth, len(ranked.tokens))
    if max_depth > 0:
        push_children(0, ROOT, 1.0, (), kind.is_streak)
    while heap and len(tokens) < budget.max_nodes:
        path, _, candidate, parent, ranks = heapq.heappop(heap)
        token = ranked.tokens[len(ranks) - 1][candidate]
        tokens.append(token)
        parents.append(parent)
        probabilities.append(-path)
        if len(ranks) < max_depth and len(tokens) < budget.max_nodes and token not in ends:
            push_children(candidate, len(tokens) - 1, -path, ranks, ranks[-1] == 0)
    return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities)
