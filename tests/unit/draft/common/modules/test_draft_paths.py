"""Trees of the most probable paths, and what the target's decisions teach about them."""

from __future__ import annotations

import pytest

from cluster.core.drafting import DraftBudget
from cluster.core.tree import ROOT, TokenTree
from workers.draft.common.modules.ranked_paths import PathCalibration, RankedPaths, Shape, draft_paths
from workers.draft.common.trees.calibration import KINDS

RANKED = RankedPaths(
    tokens=[[10, 11, 12], [20, 21, 22], [30, 31, 32]],
    order=[[[0, 1, 2]], [[0, 1, 2], [2, 1, 0], [1, 0, 2]], [[0, 1, 2]]],
    confidences=[[[0.6, 0.3, 0.1]], [[0.7, 0.2, 0.1], [0.9, 0.05, 0.05], [0.5, 0.4, 0.1]], [[0.8, 0.1, 0.05]]],
)
"""The second candidate is followed by other tokens than the first one."""


def drafted(
    budget: DraftBudget,
    shape: Shape | None = None,
    calibration: PathCalibration | None = None,
    ends: tuple[int, ...] = (),
) -> tuple[TokenTree, tuple[float, ...]]:
    calibration = calibration or PathCalibration(3)
    return draft_paths(RANKED, budget, calibration, kind=KINDS[True, True], ends=ends, shape=shape)


def test_the_most_probable_nodes_are_drafted_with_the_tokens_below_their_own_parent() -> None:
    tree, probabilities = drafted(DraftBudget(6, 3))
    assert tree.candidates()[:2] == ((10, 20, 30), (11, 22, 30))
    assert list(probabilities) == sorted(probabilities, reverse=True)
    for node, parent in enumerate(tree.parents):
        assert 0.0 < probabilities[node] <= (1.0 if parent == ROOT else probabilities[parent])


@pytest.mark.parametrize("budget", [DraftBudget(5, 1), DraftBudget(2, 3), DraftBudget(0, 3), DraftBudget(4, 0)])
def test_a_tree_is_never_larger_or_deeper_than_its_budget(budget: DraftBudget) -> None:
    tree, probabilities = drafted(budget)
    assert (
        len(tree)
        == len(probabilities)
        == min(budget.max_nodes, 3 if budget.max_depth == 1 else 9) * bool(budget.max_depth)
    )
    assert tree.depth() <= budget.max_depth


def test_a_static_shape_keeps_its_own_nodes_and_the_most_probable_ones_of_a_small_budget() -> None:
    shape = frozenset({(0,), (1,), (0, 0), (1, 0), (1, 1)})
    tree, _ = drafted(DraftBudget(9, 3), shape)
    assert set(tree.candidates()) == {(10, 20), (11, 22), (11, 21)}
    assert drafted(DraftBudget(2, 3), shape)[0] == TokenTree.chain([10, 20])


def test_nothing_follows_a_token_that_ends_the_answer() -> None:
    tree, _ = drafted(DraftBudget(9, 3), ends=(10,))
    assert tree.children(tree.tokens.index(10)) == ()


def test_decisions_of_the_target_move_the_tree_to_the_tokens_that_it_takes() -> None:
    calibration = PathCalibration(3)
    for _ in range(200):
        is_first = calibration.observe(RANKED, [11, 22, 99], KINDS[True, True])
    assert not is_first
    tree, probabilities = drafted(DraftBudget(2, 3), calibration=calibration)
    assert tree == TokenTree.chain([11, 22])
    assert min(probabilities) > 0.8
    assert calibration.observe(RANKED, [10], KINDS[True, True])
