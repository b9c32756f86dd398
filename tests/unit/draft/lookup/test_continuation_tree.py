"""The tree has the most probable continuations, within its budget, with consistent probabilities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.tree import ROOT, TokenTree
from workers.draft.lookup.continuation_tree import LEAST_PATH_PROBABILITY, Continuation, merge
from workers.draft.lookup.sequence_drafter import Reliability


def share(weight: float, total: float, match_length: int) -> float:
    return weight / (total + 0.5)


def test_equal_continuations_share_their_nodes_and_add_up() -> None:
    found = merge([Continuation((1, 2), 3), Continuation((1, 3), 3), Continuation((4,), 3)], 8, 8, share)
    assert found.tree == TokenTree((1, 4, 2, 3), (-1, -1, 0, 0))
    assert found.conditionals == pytest.approx((2 / 3.5, 1 / 3.5, 1 / 2.5, 1 / 2.5))
    assert found.probabilities == pytest.approx((2 / 3.5, 1 / 3.5, 2 / 3.5 / 2.5, 2 / 3.5 / 2.5))


def test_a_longer_match_counts_more() -> None:
    found = merge([Continuation((1,), 2), Continuation((2,), 4), Continuation((1,), 2)], 8, 8, share)
    assert found.tree.tokens == (2, 1)
    assert found.conditionals == pytest.approx((1 / 2.0, 0.5 / 2.0))


def test_nothing_follows_a_token_that_ends_the_answer() -> None:
    found = merge([Continuation((1, 2, 3), 8)], 8, 8, share, ends=(2,))
    assert found.tree == TokenTree.chain((1, 2))


def test_estimates_of_siblings_are_scaled_to_one() -> None:
    found = merge([Continuation((1,), 2), Continuation((2,), 2)], 8, 8, lambda *_: 0.9)
    assert found.conditionals == (0.5, 0.5)


@given(
    st.lists(st.builds(Continuation, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 40)), max_size=12),
    st.integers(0, 12),
    st.integers(0, 6),
)
def test_any_tree_keeps_its_budget_and_its_probabilities_fall(
    continuations: list[Continuation], max_nodes: int, max_depth: int
) -> None:
    found = merge(continuations, max_nodes, max_depth, share)
    tree = found.tree
    assert len(tree) <= max_nodes and tree.depth() <= max_depth
    assert len(found.probabilities) == len(found.conditionals) == len(tree)
    assert list(found.probabilities) == sorted(found.probabilities, reverse=True)
    for node, parent in enumerate(tree.parents):
        above = 1.0 if parent == ROOT else found.probabilities[parent]
        assert LEAST_PATH_PROBABILITY <= found.probabilities[node] <= above
        path = list(tree.path_tokens(node))
        assert any(list(one.tokens[: len(path)]) == path for one in continuations)


def test_reliability_begins_with_the_estimate_and_learns_the_rate() -> None:
    reliability = Reliability()
    assert reliability.probability(0.8) == 0.8
    for trial in range(600):
        reliability.observe(0.8, trial % 4 == 0)
    assert reliability.probability(0.8) == pytest.approx(0.25, abs=0.05)
    assert reliability.probability(0.3) == 0.3
    assert 0.0 <= reliability.probability(0.0) <= reliability.probability(1.0) <= 1.0
