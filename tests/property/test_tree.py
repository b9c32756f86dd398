"""Token trees: properties of all trees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.tree import ROOT, TokenTree

LARGEST = 64


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Any valid tree. It has few distinct tokens, so that branches have equal tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        token, parent = draw(st.integers(0, 5)), draw(st.integers(ROOT, len(tokens) - 1))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tokens of the path to every node. Equal for trees that differ only in the order of nodes."""
    return {tree.path_tokens(node) for node in range(len(tree))}


@given(trees())
def test_a_tree_is_rebuilt_from_its_candidates(tree: TokenTree) -> None:
    again = TokenTree.from_candidates(tree.candidates(), max_nodes=LARGEST)
    assert len(again) == len(tree)
    assert paths(again) == paths(tree)


@given(trees())
def test_a_trie_is_rebuilt_from_its_candidates_node_for_node(tree: TokenTree) -> None:
    trie = TokenTree.from_candidates(tree.candidates(), max_nodes=LARGEST)
    assert TokenTree.from_candidates(trie.candidates(), max_nodes=LARGEST) == trie


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6), st.integers(0, 12))
def test_a_trie_holds_every_candidate_up_to_its_bound(candidates: list[list[int]], max_nodes: int) -> None:
    tree = TokenTree.from_candidates(candidates, max_nodes)
    prefixes = {tuple(candidate[:end]) for candidate in candidates for end in range(1, len(candidate) + 1)}
    assert len(tree) == min(max_nodes, len(prefixes))
    assert paths(tree) <= prefixes


@given(trees())
def test_the_path_to_a_node_is_its_ancestors_and_itself(tree: TokenTree) -> None:
    for node in range(len(tree)):
        ancestors, above = {node}, tree.parents[node]
        while above != ROOT:
            ancestors.add(above)
            above = tree.parents[above]
        assert set(tree.path(node)) == ancestors
        assert tree.depths()[node] == len(ancestors)


@given(trees(), st.integers(0, 14), st.integers(0, 8))
def test_truncation_keeps_as_many_nodes_as_the_bounds_allow(tree: TokenTree, nodes: int, depth: int) -> None:
    cut = tree.subset(tree.within(nodes, depth))
    assert len(cut) <= nodes
    assert cut.depth() <= depth
    assert paths(cut) <= paths(tree)
    shallow = sum(one <= depth for one in tree.depths())
    assert len(cut) == min(nodes, shallow)
    assert cut.subset(cut.within(nodes, depth)) == cut


@given(trees())
def test_a_walk_by_tokens_finds_every_node(tree: TokenTree) -> None:
    for node in range(len(tree)):
        found: int | None = ROOT
        for token in tree.path_tokens(node):
            assert found is not None
            found = tree.child(found, token)
        assert found == node


@given(st.lists(st.integers(0, 9), max_size=10))
def test_a_chain_has_one_candidate_which_is_itself(tokens: list[int]) -> None:
    chain = TokenTree.chain(tokens)
    assert chain.is_chain
    assert chain.candidates() == ((tuple(tokens),) if tokens else ())
