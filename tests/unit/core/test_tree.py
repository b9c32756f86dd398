"""Token trees: examples."""

from __future__ import annotations

import pytest

from cluster.core.errors import InvalidRequest
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree

#      ┌ 5 ─┬ 6 ─ 8
# root ┤    └ 7
#      └ 9
BRANCHED = TokenTree(tokens=(5, 9, 6, 7, 8), parents=(-1, -1, 0, 0, 2))


def test_the_empty_tree_is_plain_decoding() -> None:
    assert (len(EMPTY_TREE), EMPTY_TREE.depth(), EMPTY_TREE.is_chain) == (0, 0, True)
    assert EMPTY_TREE.candidates() == ()
    assert EMPTY_TREE.child(ROOT, 5) is None


def test_candidates_merge_into_a_trie_and_the_first_get_their_nodes() -> None:
    tree = TokenTree.from_candidates([(5, 6, 8), (5, 7), (9,)], max_nodes=10)
    assert tree == TokenTree(tokens=(5, 6, 8, 7, 9), parents=(-1, 0, 1, 0, -1))
    assert TokenTree.from_candidates([(5, 6, 8), (5, 7), (9,)], max_nodes=4).candidates() == ((5, 6, 8), (5, 7))


def test_a_full_tree_still_follows_candidates_it_holds_already() -> None:
    tree = TokenTree.from_candidates([(5, 6), (5, 6, 7), (8,)], max_nodes=2)
    assert tree == TokenTree.chain([5, 6])


def test_depths_paths_and_children() -> None:
    assert BRANCHED.depths() == (1, 1, 2, 2, 3)
    assert BRANCHED.path(4) == (0, 2, 4)
    assert BRANCHED.path(ROOT) == ()
    assert BRANCHED.path_tokens(3) == (5, 7)
    assert (BRANCHED.child(ROOT, 9), BRANCHED.child(0, 7), BRANCHED.child(ROOT, 7)) == (1, 3, None)
    assert BRANCHED.leaves() == (1, 3, 4)
    assert not BRANCHED.is_chain


def test_truncation_keeps_the_first_and_shallow_nodes() -> None:
    assert BRANCHED.subset(BRANCHED.within(10, 10)) is BRANCHED
    assert BRANCHED.subset(BRANCHED.within(10, 1)) == TokenTree((5, 9), (-1, -1))
    assert BRANCHED.subset(BRANCHED.within(3, 10)) == TokenTree((5, 9, 6), (-1, -1, 0))
    assert BRANCHED.subset(BRANCHED.within(0, 10)) == EMPTY_TREE


@pytest.mark.parametrize(
    ("tokens", "parents", "field"),
    [
        ((1, 2), (-1,), "tree.parents"),
        ((1,), (0,), "tree.parents[0]"),
        ((1, 2), (-1, 1), "tree.parents[1]"),
        ((1, 2), (-1, -2), "tree.parents[1]"),
        ((1, 1), (-1, -1), "tree.tokens[1]"),
    ],
)
def test_an_invalid_tree_cannot_be_built(tokens: tuple[int, ...], parents: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        TokenTree(tokens, parents)
    assert refusal.value.field == field


def test_equal_tokens_under_different_parents_are_not_siblings() -> None:
    assert len(TokenTree((1, 1, 1), (-1, 0, 1))) == 3
