"""Columns of several trees say of each node what the trees themselves say."""

from __future__ import annotations

import random

from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.sampling.tree_columns import TreeColumns


def random_tree(nodes: int, draw: random.Random) -> TokenTree:
    return TokenTree(tuple(range(nodes)), tuple(draw.randrange(-1, node) for node in range(nodes)))


def test_depths_and_ancestors_are_those_of_each_tree() -> None:
    draw = random.Random(3)
    for _ in range(40):
        trees = [random_tree(draw.choice((0, 1, 7, 40, 64, 65, 150)), draw) for _ in range(draw.randrange(1, 6))]
        columns = TreeColumns(trees)
        assert columns.sizes.tolist() == [len(tree) for tree in trees]
        assert columns.depths.tolist() == [depth for tree in trees for depth in tree.depths()]
        words = [sum(int(word) << (64 * part) for part, word in enumerate(row)) for row in columns.ancestors()]
        assert words == [sum(1 << one for one in tree.path(node)) for tree in trees for node in range(len(tree))]


def test_chains_and_empty_trees() -> None:
    columns = TreeColumns([EMPTY_TREE, TokenTree.chain((4, 4, 4)), EMPTY_TREE, TokenTree.chain((7,))])
    assert columns.trees.tolist() == [1, 1, 1, 3]
    assert columns.depths.tolist() == [1, 2, 3, 1]
    assert columns.ancestors().tolist() == [[1], [3], [7], [1]]
    assert columns.are_chains
    assert not TreeColumns([TokenTree((4, 5), (-1, -1))]).are_chains
    assert TreeColumns([TokenTree.chain(range(64))]).ancestors().tolist() == [[(2 << node) - 1] for node in range(64)]
    assert TreeColumns([TokenTree.chain(range(66))]).ancestors()[65].tolist() == [(1 << 64) - 1, 3]
    assert TreeColumns([EMPTY_TREE]).ancestors().shape == (0, 0)
    assert TreeColumns([]).depths.tolist() == []
