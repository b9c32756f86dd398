"""Rules that keep the distribution, on single trees: what they accept, and which random numbers they use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.core.drafting import DraftDistribution
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.statistical.test_exact_rules import CASES
from tests.support.fakes.host_waits import OnGpu
from workers.sampling import residual
from workers.sampling.acceptance import RULES, AcceptanceRule, AcceptsTogether, DecidedTree, DrawnDrafts, RootPosition
from workers.sampling.residual import Weights, draft_probabilities, draw, look_up
from workers.sampling.rules.block import Block
from workers.sampling.rules.rejection import Rejection
from workers.sampling.uniform import random_bits, uniform
from workers.transfer import HostCopies

NAMES = [
    name
    for name, plugin in RULES.items()
    if name != "coupled" and not (plugin.settings.__doc__ or "").startswith(("LOSSY", "NOT LOSSLESS"))
]
"""All rules that keep the distribution, without the default."""
DRAWN = [name for name in NAMES if RULES.get(name).drawn_drafts is not DrawnDrafts.NONE]
"""The lossless rules, without the default, that read the distributions of drafts."""
every_rule = pytest.mark.parametrize("name", NAMES)
every_drawn_rule = pytest.mark.parametrize("name", DRAWN)
TREE = TokenTree(tokens=(5, 6, 7, 8, 9), parents=(-1, -1, 0, 2, 2))
FLAT = torch.full((6, 10), 0.1).log()


def rule_of(name: str) -> AcceptanceRule:
    plugin = RULES.get(name)
    return plugin.create(plugin.settings())


@every_rule
def test_at_temperature_zero_the_rules_are_coupled(name: str) -> None:
    rule = rule_of(name)
    for decisions in ([5, 7, 0, 9, 0, 4], [6, 7, 2, 0, 0, 0], [1, 7, 0, 8, 0, 0]):
        assert (
            rule.accept(DecidedTree(TREE, decisions, RootPosition(is_greedy=True), FLAT))
            == DecidedTree(TREE, decisions).walk()
        )


@every_rule
def test_the_same_seed_and_position_yield_the_same_tokens(name: str) -> None:
    rule = rule_of(name)
    first, again = (rule.accept(DecidedTree(TREE, [0] * 6, RootPosition(3, 20), FLAT)) for _ in range(2))
    assert first == again
    others = {rule.accept(DecidedTree(TREE, [0] * 6, RootPosition(seed, 20), FLAT)).tokens for seed in range(20)}
    assert len(others) > 5


@every_rule
def test_logits_without_a_number_yield_no_token(name: str) -> None:
    rule = rule_of(name)
    nothing = torch.full((1, 10), -torch.inf)
    assert rule.accept(DecidedTree(EMPTY_TREE, [-1], RootPosition(), nothing)).tokens == (-1,)


@every_drawn_rule
def test_a_token_that_its_distribution_excludes_is_never_accepted(name: str) -> None:
    rule = rule_of(name)
    stated = (DraftDistribution((1, 2), (0.5, 0.5)),)
    for seed in range(20):
        accepted = rule.accept(DecidedTree(TokenTree.chain([5]), [0, 0], RootPosition(seed), FLAT[:2], stated))
        assert accepted.nodes == ()


@every_drawn_rule
def test_draft_tokens_beyond_the_targets_vocabulary_are_harmless(name: str) -> None:
    rule = rule_of(name)
    stated = (DraftDistribution((5, 700), (0.1, 0.9)),)
    assert rule.accept(DecidedTree(TokenTree.chain([5]), [0, 0], RootPosition(1), FLAT[:2], stated)).nodes == (0,)


def test_the_distribution_of_every_rule_is_compared_with_the_targets() -> None:
    assert {type(rule_of(name)) for name in NAMES} == {type(rule) for rule, _, _ in CASES.values()}


def test_block_ignores_all_but_first_children() -> None:
    certain = torch.zeros(6, 10)
    certain[:, 6] = 1.0  # 6 is the second child of the root
    assert Block().accept(DecidedTree(TREE, [0] * 6, RootPosition(), certain.log())).tokens == (6,)
    assert Rejection().accept(DecidedTree(TREE, [0] * 6, RootPosition(), certain.log())).tokens == (6, 6)


@every_rule
def test_the_target_must_have_computed_its_distribution(name: str) -> None:
    rule = rule_of(name)
    with pytest.raises(ValueError, match="log_probabilities"):
        rule.accept(DecidedTree(EMPTY_TREE, [1], RootPosition()))
    with pytest.raises(ValueError, match="2 decisions for a tree of 0 nodes"):
        rule.accept(DecidedTree(EMPTY_TREE, [1, 2], RootPosition(), FLAT))


def test_earlier_siblings_are_removed_from_the_draft_distribution() -> None:
    stated = (DraftDistribution((5, 6, 7), (0.5, 0.3, 0.2)),) * 2
    tree = TokenTree((5, 6), (-1, -1))
    assert draft_probabilities(tree, 1, stated, [5]) == pytest.approx({6: 0.6, 7: 0.4})
    assert draft_probabilities(tree, 1, stated, [5, 6, 7]) == {}
    assert draft_probabilities(tree, 1, ()) == {6: 1.0}


def test_a_residual_is_never_negative_and_leaves_out_tokens_that_the_target_does_not_have() -> None:
    logs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    target = look_up(logs, {1: (0,), 0: (0, 2, 9)}, HostCopies())(0)
    assert target.named == pytest.approx({0: 0.5, 2: 0.2})
    assert (target.others, target.total) == pytest.approx((0.3, 1.0))
    left = target.times(0.5).without({0: 0.1, 2: 0.9, 9: 1.0})
    assert left.named == pytest.approx({0: 0.15, 2: 0.0})
    assert (left.others, left.scale) == pytest.approx((0.15, 0.5))


def test_a_draw_returns_only_tokens_with_a_weight() -> None:
    logs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()
    without_the_last = Weights(0, {4: 0.0}, 0.75)
    drawn = draw(logs, [without_the_last] * 4, [0.0, 0.66, 0.67, 1.0])
    assert drawn == [1, 1, 3, 3]
    assert draw(logs, [Weights(1, {2: 9.0}, 0.8), Weights(1), without_the_last], [0.5, 0.5, 0.5]) == [2, 2, 1]
    assert draw(logs, [Weights(1, dict.fromkeys(range(5), 0.0))], [0.5]) == [-1]
    assert draw(logs, [], []) == []


def looked_up(logs: torch.Tensor, row: int) -> Weights:
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(logs)), (1, 7))
    return look_up(logs, tokens, HostCopies())(row)


@pytest.mark.parametrize("poison", [torch.nan, 0.0, -torch.inf])
def test_neighbours_change_no_bit_of_what_is_looked_up_and_drawn(poison: float) -> None:
    own = (3 * torch.randn(1, 100_003, generator=torch.Generator().manual_seed(0))).log_softmax(dim=1)
    logs = torch.full((9, own.shape[1]), poison)
    logs[4] = own
    alone, among = looked_up(own, 0), looked_up(logs, 4)
    assert (among.named, among.others) == (alone.named, alone.others)
    numbers = [index / 64 for index in range(64)]
    beside = [replace(alone, row=row) for row in (0, 4, 8)]
    for number in numbers:
        assert draw(logs, beside, [number] * 3)[1] == draw(own, [alone], [number])[0]


def test_a_look_up_takes_a_time_in_proportion_to_its_rows() -> None:
    """Each row that is read finds its numbers by itself, without a look at the rows before it."""
    rows, looks = 64, 0
    logs = torch.full((rows, 10), 0.1).log()

    class Row(int):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return int(self) == other

        __hash__ = int.__hash__

    of = look_up(logs, {Row(row): (row % 10,) for row in range(rows)}, HostCopies())
    looks = 0
    assert [len(of(row).named) for row in range(rows)] == [1] * rows
    assert looks <= 4 * rows


def chunked(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(residual._CHUNK_ELEMENTS, "cpu", rows * 10)


@every_drawn_rule
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_all_rows_of_a_step_are_accepted_as_alone_with_two_waits(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are trees of several sizes, with and without distributions of drafts, and greedy ones."""
    chunked(rows, monkeypatch)
    rule, random = rule_of(name), torch.Generator().manual_seed(0)
    assert isinstance(rule, AcceptsTogether)
    steps = list[DecidedTree]()
    for seed, tree in enumerate([TREE, EMPTY_TREE, TokenTree.chain([5, 6, 7]), TREE, TREE, EMPTY_TREE]):
        logs = (3 * torch.randn(len(tree) + 1, 10, generator=random)).log_softmax(dim=1)
        stated = [DraftDistribution((token, 3, 700), (0.5, 0.3, 0.2)) for token in tree.tokens] if seed % 2 else []
        decisions = logs.argmax(dim=1).tolist()
        steps.append(DecidedTree(tree, decisions, RootPosition(seed, 20, is_greedy=seed == 4), logs, stated))
    alone = [rule.accept(step) for step in steps]
    whole, copies = torch.cat([step.known_log_probabilities for step in steps]), HostCopies()
    undecided = [replace(step, decisions=[-1] * (len(step.tree) + 1)) for step in steps]
    with OnGpu() as gpu:
        assert rule.launch(undecided, whole, copies)(steps) == alone
    assert gpu.waits == ["copies"] * 2  # the first one also brings the decisions
    assert len({one.nodes for one in alone}) > 1


def test_random_numbers_depend_on_purpose_and_all_counters() -> None:
    numbers = {uniform(purpose, *at) for purpose in (b"a", b"b") for at in ((1, 2), (2, 1), (1, 2, 0), (1, 3))}
    assert len(numbers) == 8
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert random_bits(b"a", 2**64 - 1, 0) != random_bits(b"a", 0, 2**64 - 1)
