"""Finds the static tree of Medusa (Cai et al. 2024): the nodes whose paths the target takes most often."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.distill.answers import Answer
from workers.distill.modules.batches import TapBatch
from workers.distill.modules.learner import TappedModule, over_paths
from workers.distill.modules.path_loss import written_ranks
from workers.distill.modules.paths import Paths
from workers.model.drafting.selector import CANDIDATES

MOST_NODES = 64
"""Nodes of a stored tree. Serving uses the first ones, as many as a tree may have."""


def rank_accuracies(
    tapped: TappedModule, answers: Sequence[Answer], max_length: int, *, autocast: bool
) -> list[list[float]]:
    """How often the written token has each rank at each depth, [depths][ranks], below the written token before it.

    Measured on greedy answers that were not trained on; empty without any. The module predicts all depths at once.
    """

    def counts_of(paths: Paths, batch: TapBatch) -> Tensor:
        """[depths, 1 + ranks]: known tokens, and those of each rank."""
        ranks, is_known = written_ranks(paths, batch, tapped.ends, tapped.selector)
        wanted = torch.arange(CANDIDATES, device=ranks.device)
        return torch.cat([is_known.unsqueeze(-1), ranks.unsqueeze(-1) == wanted], dim=-1).sum(dim=0).cpu()

    found = over_paths(tapped, answers, max_length, 1, counts_of, autocast=autocast)
    if not found:
        return []
    counts = torch.stack(found).sum(dim=0).float()
    accuracies: list[list[float]] = (counts[:, 1:] / counts[:, :1].clamp(min=1)).tolist()
    return accuracies


def greedy_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """The `nodes` nodes of the largest product of the accuracies along their path, the largest first.

    A node is the ranks along its path; its parent comes before it. Each added node adds the most to the expected
    accepted length, which is the sum of the products. Nodes that are never right are left out.
    """
    tree: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = []

    def push_children(path: tuple[int, ...], probability: float) -> None:
        for rank, accuracy in enumerate(accuracies[len(path)]):
            if accuracy > 0.0:
                heapq.heappush(heap, (-probability * accuracy, (*path, rank)))

    if accuracies:
        push_children((), 1.0)
    while heap and len(tree) < nodes:
        probability, path = heapq.heappop(heap)
        tree.append(path)
        if len(path) < len(accuracies):
            push_children(path, -probability)
    return tuple(tree)
