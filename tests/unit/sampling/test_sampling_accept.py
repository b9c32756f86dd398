"""The coupled walk, synthetic acceptance, and the registry of acceptance rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.sampling.acceptance import RULES, Accepted, DecidedTree, RootPosition, create_rule
from workers.sampling.rules.coupled import Coupled
from workers.sampling.rules.synthetic import Synthetic, synthetic_token
from workers.serve.configuration import load_configuration

# 5 ─ 7 ─ 8
# 6   └ 9      (9 is a child of 7; 6 is a sibling of 5)
TREE = TokenTree(tokens=(5, 6, 7, 8, 9), parents=(-1, -1, 0, 2, 2))


def test_an_empty_tree_yields_the_targets_own_token() -> None:
    accepted = DecidedTree(EMPTY_TREE, [3]).walk()
    assert (accepted.nodes, accepted.tokens) == ((), (3,))


def test_a_rejected_draft_yields_the_correction_alone() -> None:
    accepted = DecidedTree(TREE, [1, 7, 0, 8, 0, 0]).walk()
    assert (accepted.nodes, accepted.tokens) == ((), (1,))


def test_an_accepted_path_ends_with_a_bonus_token() -> None:
    accepted = DecidedTree(TREE, [5, 7, 0, 9, 0, 4]).walk()
    assert (accepted.nodes, accepted.tokens) == ((0, 2, 4), (5, 7, 9, 4))


def test_a_second_sibling_is_followed_as_well_as_the_first() -> None:
    accepted = DecidedTree(TREE, [6, 7, 2, 0, 0, 0]).walk()
    assert (accepted.nodes, accepted.tokens) == ((1,), (6, 2))


def test_decisions_off_the_path_do_not_matter() -> None:
    assert DecidedTree(TREE, [5, 1, 5, 5, 5, 5]).walk() == DecidedTree(TREE, [5, 1, 9, 9, 9, 9]).walk()


def test_a_path_is_cut_after_the_first_token_that_ends_the_answer() -> None:
    accepted = Accepted((0, 2, 3), (5, 6, 7, 8))
    assert accepted.until((6, 8)) == Accepted((0,), (5, 6))
    assert accepted.until((5,)) == Accepted((), (5,))
    assert accepted.until((8, 9)) == accepted
    assert accepted.until(()) == accepted


def test_every_node_needs_a_decision() -> None:
    with pytest.raises(ValueError, match="5 decisions for a tree of 5 nodes"):
        DecidedTree(TREE, [5, 7, 0, 9, 0]).walk()


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6), st.data())
def test_a_walk_is_a_root_path_whose_tokens_are_the_decisions(candidates: list[list[int]], data: st.DataObject) -> None:
    tree = TokenTree.from_candidates(candidates, max_nodes=20)
    decisions = data.draw(st.lists(st.integers(0, 3), min_size=len(tree) + 1, max_size=len(tree) + 1))
    accepted = DecidedTree(tree, decisions).walk()
    last = accepted.nodes[-1] if accepted.nodes else -1
    assert accepted.nodes == tree.path(last)
    assert accepted.tokens[:-1] == tree.path_tokens(last)
    assert accepted.tokens == tuple(decisions[node + 1] for node in (-1, *accepted.nodes))
    assert tree.child(last, accepted.tokens[-1]) is None


CHAIN = TokenTree.chain([5, 6, 7, 8])
DECISIONS = [1, 2, 3, 4, 9]


def test_a_rate_of_one_accepts_every_first_child_and_one_synthetic_token_more() -> None:
    accepted = Synthetic((1.0,)).accept(DecidedTree(TREE, [1, 2, 3, 4, 0, 0], RootPosition(7, 20, 100)))
    assert (accepted.nodes, accepted.tokens) == ((0, 2, 3), (5, 7, 8, synthetic_token(7, 23, 100)))


def test_a_rate_of_zero_takes_the_targets_own_token() -> None:
    accepted = Synthetic((0.0,)).accept(DecidedTree(CHAIN, DECISIONS, RootPosition()))
    assert (accepted.nodes, accepted.tokens) == ((), (1,))


def test_each_depth_has_its_rate_and_the_last_one_repeats() -> None:
    assert Synthetic((1.0, 1.0, 0.0)).accept(DecidedTree(CHAIN, DECISIONS, RootPosition(3, 4))).tokens == (5, 6, 3)
    assert Synthetic((1.0, 1.0)).accept(DecidedTree(CHAIN, DECISIONS, RootPosition(3, 4))).nodes == (0, 1, 2, 3)
    assert Synthetic((1.0, 0.0)).accept(DecidedTree(EMPTY_TREE, [3], RootPosition(3, 4, 50))).tokens == (
        synthetic_token(3, 4, 50),
    )


@pytest.mark.parametrize("seed", range(10))
def test_with_one_rate_the_text_is_the_same_whatever_was_drafted(seed: int) -> None:
    """The target decides -1 here, to distinguish its own tokens from drafted ones."""
    rule, begin, vocabulary = Synthetic((0.7,)), 10, 1000
    texts = []
    for length in (0, 1, 3, 8):
        text: list[int] = []
        while len(text) < 40:
            position = begin + len(text)
            chain = TokenTree.chain(synthetic_token(seed, position + depth, vocabulary) for depth in range(length))
            text.extend(
                rule.accept(DecidedTree(chain, [-1] * (length + 1), RootPosition(seed, position, vocabulary))).tokens
            )
        texts.append(text[:40])
    assert texts == [texts[0]] * 4
    assert -1 in texts[0]


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.9])
def test_drafts_are_accepted_at_the_configured_rate(rate: float) -> None:
    rule = Synthetic((rate,))
    draws = [(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(2000)]
    taken = sum(
        len(rule.accept(DecidedTree(TokenTree.chain([1]), [0, 0], RootPosition(*draw))).nodes) for draw in draws
    )
    assert abs(taken / len(draws) - rate) < 4 * (rate * (1 - rate) / len(draws)) ** 0.5


def test_synthetic_tokens_differ_by_seed_and_by_position() -> None:
    tokens = {synthetic_token(seed, position, 1 << 20) for seed in range(30) for position in range(30)}
    assert len(tokens) > 880


def test_synthetic_acceptance_requires_a_decision_for_every_node_too() -> None:
    with pytest.raises(ValueError, match="4 decisions for a tree of 4 nodes"):
        Synthetic((0.5,)).accept(DecidedTree(CHAIN, [0] * 4, RootPosition()))


def test_the_coupled_rule_is_the_default() -> None:
    rule = create_rule(TargetSection())
    assert rule == Coupled()
    assert rule.is_lossless
    assert not rule.needs_distribution
    assert (
        rule.accept(DecidedTree(TREE, [5, 7, 0, 9, 0, 4], RootPosition(1, 2)))
        == DecidedTree(TREE, [5, 7, 0, 9, 0, 4]).walk()
    )


def test_the_synthetic_rule_brings_its_settings_and_is_not_lossless() -> None:
    target = load_configuration({"target": {"acceptance": "synthetic", "synthetic": {"rates": (0.8, 0.5)}}}).target
    rule = create_rule(target)
    assert rule == Synthetic((0.8, 0.5))
    assert not rule.is_lossless
    with pytest.raises(ConfigurationError, match=r"target\.synthetic: rates must hold at least one number"):
        load_configuration({"target": {"acceptance": "synthetic"}})
    with pytest.raises(ConfigurationError, match=r"target\.synthetic\.rates"):
        load_configuration({"target": {"acceptance_rates": [0.5]}})


def test_an_unknown_rule_is_refused_with_the_nearest_name() -> None:
    known = ", ".join(RULES.names())
    message = rf"target\.acceptance: 'couple' is unknown; it must be one of {known} \(the nearest is coupled\)"
    with pytest.raises(ConfigurationError, match=message):
        create_rule(TargetSection(acceptance="couple"))
