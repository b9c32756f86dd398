"""The coupled walk, and the registry of acceptance rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.errors import ConfigurationError
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.sampling.accept import acceptance_rule, register_rule, walk

# 5 ─ 7 ─ 8
# 6   └ 9      (9 hangs under 7, 6 beside 5)
TREE = TokenTree(tokens=(5, 6, 7, 8, 9), parents=(-1, -1, 0, 2, 2))


def test_an_empty_tree_yields_the_targets_own_token() -> None:
    accepted = walk(EMPTY_TREE, [3])
    assert (accepted.nodes, accepted.tokens) == ((), (3,))


def test_a_wrong_guess_yields_the_correction_alone() -> None:
    accepted = walk(TREE, [1, 7, 0, 8, 0, 0])
    assert (accepted.nodes, accepted.tokens) == ((), (1,))


def test_right_guesses_are_followed_to_the_leaf_and_a_bonus() -> None:
    accepted = walk(TREE, [5, 7, 0, 9, 0, 4])
    assert (accepted.nodes, accepted.tokens) == ((0, 2, 4), (5, 7, 9, 4))


def test_a_second_sibling_is_followed_as_well_as_the_first() -> None:
    accepted = walk(TREE, [6, 7, 2, 0, 0, 0])
    assert (accepted.nodes, accepted.tokens) == ((1,), (6, 2))


def test_decisions_off_the_path_do_not_matter() -> None:
    assert walk(TREE, [5, 1, 5, 5, 5, 5]) == walk(TREE, [5, 1, 9, 9, 9, 9])


def test_every_node_needs_a_decision() -> None:
    with pytest.raises(ValueError, match="5 decisions for a tree of 5 nodes"):
        walk(TREE, [5, 7, 0, 9, 0])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6), st.data())
def test_a_walk_is_a_root_path_whose_tokens_are_the_decisions(candidates: list[list[int]], data: st.DataObject) -> None:
    tree = TokenTree.from_candidates(candidates, max_nodes=20)
    decisions = data.draw(st.lists(st.integers(0, 3), min_size=len(tree) + 1, max_size=len(tree) + 1))
    accepted = walk(tree, decisions)
    last = accepted.nodes[-1] if accepted.nodes else -1
    assert accepted.nodes == tree.path(last)
    assert accepted.tokens[:-1] == tree.path_tokens(last)
    assert accepted.tokens == tuple(decisions[node + 1] for node in (-1, *accepted.nodes))
    assert tree.child(last, accepted.tokens[-1]) is None


def test_the_coupled_rule_is_the_default() -> None:
    assert acceptance_rule() is walk
    assert acceptance_rule("coupled") is walk


def test_an_unknown_rule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="'couple' is unknown; the nearest one is 'coupled'"):
        acceptance_rule("couple")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register_rule("coupled")(walk)
