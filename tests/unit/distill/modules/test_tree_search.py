"""Medusa's search of a static tree: the nodes that add the most to the expected accepted length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from tests.support.models import drafting_modules
from workers.distill.answers import Answer
from workers.distill.modules.learner import TappedModule, measure
from workers.distill.modules.tap_cache import TapCache
from workers.distill.modules.tree_search import greedy_tree, rank_accuracies
from workers.model.drafting.files import load_ends, make_module

ACCURACIES = [[0.5, 0.3, 0.1], [0.4, 0.2, 0.0], [0.3, 0.25, 0.05]]


def expected_length(tree: tuple[tuple[int, ...], ...]) -> float:
    total = 0.0
    for path in tree:
        share = 1.0
        for depth, rank in enumerate(path):
            share *= ACCURACIES[depth][rank]
        total += share
    return total


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_tree_of_as_many_nodes_has_a_longer_expected_path(nodes: int) -> None:
    paths = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    trees = [tree for tree in combinations(paths, nodes) if all(len(path) == 1 or path[:-1] in tree for path in tree)]

    found = greedy_tree(ACCURACIES, nodes)

    assert len(found) == nodes
    assert expected_length(found) == pytest.approx(max(map(expected_length, trees)))


def test_every_beginning_of_the_list_is_a_tree() -> None:
    found = greedy_tree(ACCURACIES, 100)

    assert all(len(path) == 1 or path[:-1] in found[:place] for place, path in enumerate(found))
    assert len(set(found)) == len(found) == 3 + 3 * 2 + 3 * 2 * 3  # nothing with a share of 0
    assert greedy_tree([], 7) == ()


@pytest.mark.parametrize(("kind", "taps"), [("heads", (3,)), ("block", (1, 2, 3))])
def test_the_first_rank_is_as_often_right_as_the_greedy_chain(
    target_directory: Path,
    tap_cache_of: Callable[[tuple[int, ...]], TapCache],
    answers: tuple[Answer, ...],
    kind: str,
    taps: tuple[int, ...],
) -> None:
    card = drafting_modules.card_for(target_directory, kind, taps)
    ends = load_ends(target_directory, card, None, torch.float32, torch.device("cpu"))
    module = make_module(ends, drafting_modules.shapes(48)[kind], taps)
    drafting_modules.randomized(module)
    tapped = TappedModule(module, ends, tap_cache_of(taps))

    accuracies = rank_accuracies(tapped, answers, 64, autocast=False)

    chain = measure(tapped, answers, 64, 3, autocast=False)
    right = chain.reached[0] if chain.reached else 0
    assert accuracies[0][0] == pytest.approx(right / chain.paths)
    assert all(0 <= share <= 1 and sum(ranks) <= 1.0001 for ranks in accuracies for share in ranks)
    assert rank_accuracies(tapped, (), 64, autocast=False) == []
