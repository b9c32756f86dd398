"""The lossy rules `typical` and `blockwise`: which drafted tokens they accept, and that they say they are lossy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.sampling.acceptance import RULES, DecidedTree, RootPosition, create_rule, longest_path
from workers.sampling.rules.blockwise import Blockwise
from workers.sampling.rules.typical import Typical
from workers.serve.configuration import load_configuration
from workers.transfer import HostCopies

# 5 ─ 7 ─ 8
# 6   └ 9      (9 is a child of 7; 6 is a sibling of 5)
TREE = TokenTree(tokens=(5, 6, 7, 8, 9), parents=(-1, -1, 0, 2, 2))
DRAFTS = Path(__file__).parents[3] / "deploy" / "docs" / "drafts.md"
KEEPING = re.compile(r"^With the acceptance rules (.*?), answers", re.MULTILINE)
SAMPLED, GREEDY = RootPosition(), RootPosition(is_greedy=True)


def logs(*rows: dict[int, float], size: int = 10) -> torch.Tensor:
    """Log-probabilities `[rows, size]` with these probabilities; the remaining tokens share what is left."""
    values = torch.zeros(len(rows), size)
    for row, given in enumerate(rows):
        values[row] = (1 - sum(given.values())) / (size - len(given))
        for token, probability in given.items():
            values[row, token] = probability
    return values.log()


# --- typical --------------------------------------------------------------------------------------


def test_a_token_is_typical_from_epsilon_on() -> None:
    chain = TokenTree.chain([5, 7])
    rule = Typical(epsilon=0.1, delta=1.0)
    peaked = logs({5: 0.11, 3: 0.8}, {7: 0.09, 3: 0.8}, {1: 0.9})
    assert rule.accept(DecidedTree(chain, [3, 3, 1], SAMPLED, peaked)).tokens == (5, 3)


def test_the_threshold_falls_with_the_entropy() -> None:
    """A uniform distribution over 10 tokens has the entropy ln 10, so the threshold is 0.3 · 0.1."""
    chain = TokenTree.chain([5])
    flat = logs({}, {})
    assert Typical(epsilon=1.0, delta=0.3).accept(DecidedTree(chain, [3, 1], SAMPLED, flat)).tokens == (5, 1)
    assert Typical(epsilon=1.0, delta=1.2).accept(DecidedTree(chain, [3, 1], SAMPLED, flat)).tokens == (3,)


def test_the_longest_typical_path_is_taken_and_the_targets_decision_follows() -> None:
    everything = logs(*[{}] * 6)
    accepted = Typical(epsilon=0.05, delta=1.0).accept(DecidedTree(TREE, [0, 1, 2, 3, 4, 5], SAMPLED, everything))
    assert (accepted.nodes, accepted.tokens) == ((0, 2, 3), (5, 7, 8, 4))


@pytest.mark.parametrize("poison", [torch.nan, 0.0, -torch.inf])
def test_neighbours_change_no_verdict_at_the_threshold(poison: float) -> None:
    """The threshold is that at which the row alone is still accepted: the next larger number rejects it."""
    chain, size = TokenTree.chain([5]), 100_003
    own = torch.randn(2, size, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    low, high = 0.0, 10.0
    while (delta := (low + high) / 2) not in (low, high):
        alone = Typical(epsilon=1.0, delta=delta).accept(DecidedTree(chain, [3, 1], SAMPLED, own))
        low, high = (delta, high) if alone.nodes else (low, delta)
    others = [DecidedTree(chain, [3, 1], SAMPLED, torch.full((2, size), poison)) for _ in range(3)]
    steps = [*others, DecidedTree(chain, [3, 1], SAMPLED, own), *others]
    whole = torch.cat([step.known_log_probabilities for step in steps])
    for delta, nodes in ((low, (0,)), (high, ())):
        found = Typical(epsilon=1.0, delta=delta).launch(steps, whole, HostCopies())(steps)
        assert found[3].nodes == nodes


def test_an_impossible_token_is_not_typical() -> None:
    impossible = logs({5: 0.0}, {})
    assert Typical(0.09, 0.3).accept(DecidedTree(TokenTree.chain([5]), [3, 1], SAMPLED, impossible)).tokens == (3,)


@pytest.mark.parametrize("decisions", [[5, 7, 0, 9, 0, 4], [1, 7, 0, 8, 0, 0]])
def test_at_temperature_zero_typical_is_coupled(decisions: list[int]) -> None:
    assert (
        Typical(0.09, 0.3).accept(DecidedTree(TREE, decisions, GREEDY, logs(*[{}] * 6)))
        == DecidedTree(TREE, decisions).walk()
    )


# --- blockwise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decisions", [[5, 7, 0, 9, 0, 4], [6, 7, 2, 0, 0, 0], [1, 7, 0, 8, 0, 0]])
def test_strict_blockwise_is_coupled_and_lossless(decisions: list[int]) -> None:
    rule = Blockwise()
    assert rule.accept(DecidedTree(TREE, decisions, SAMPLED)) == DecidedTree(TREE, decisions).walk()
    assert rule.is_lossless
    assert not rule.needs_distribution


def test_tokens_among_the_most_probable_are_accepted() -> None:
    chain = TokenTree.chain([5, 7])
    ranked = logs({3: 0.5, 5: 0.3}, {3: 0.5, 5: 0.3, 7: 0.1}, {})
    assert Blockwise(top_k=2).accept(DecidedTree(chain, [3, 3, 1], SAMPLED, ranked)).tokens == (5, 3)
    assert Blockwise(top_k=3).accept(DecidedTree(chain, [3, 3, 1], SAMPLED, ranked)).tokens == (5, 7, 1)


def test_the_decision_is_accepted_even_if_it_is_not_among_the_most_probable() -> None:
    ranked = logs({3: 0.5, 4: 0.3}, {})
    assert Blockwise(top_k=2).accept(DecidedTree(TokenTree.chain([5]), [5, 1], SAMPLED, ranked)).tokens == (5, 1)


def test_tokens_near_the_decision_are_accepted() -> None:
    chain = TokenTree.chain([5, 7])
    assert Blockwise(distance=2).accept(DecidedTree(chain, [7, 4, 1], SAMPLED)).tokens == (5, 4)


def test_a_step_commits_at_least_the_minimum_block() -> None:
    assert Blockwise(minimum_block=3).accept(DecidedTree(TREE, [0, 0, 0, 3, 0, 0], SAMPLED)).tokens == (5, 7, 3)
    assert Blockwise(minimum_block=9).accept(DecidedTree(TREE, [0, 0, 0, 3, 4, 0], SAMPLED)).tokens == (5, 7, 8, 4)
    assert Blockwise(minimum_block=3).accept(DecidedTree(EMPTY_TREE, [8], SAMPLED)).tokens == (8,)


def test_nothing_is_close_to_a_missing_decision() -> None:
    chain = TokenTree.chain([0])
    assert Blockwise(distance=5).accept(DecidedTree(chain, [-1, 2], SAMPLED)).tokens == (-1,)


# --- both -----------------------------------------------------------------------------------------


def test_a_path_ends_at_the_first_node_that_is_not_accepted() -> None:
    assert longest_path(TREE, [True, True, False, True, True]) == (0,)
    assert longest_path(TREE, [False, True, True, True, True]) == (1,)
    assert longest_path(TREE, [True, False, True, False, True]) == (0, 2, 4)
    assert longest_path(TREE, [False] * 5) == ()


@pytest.mark.parametrize(
    ("settings", "is_lossless"),
    [
        ({"acceptance": "typical"}, False),
        ({"acceptance": "blockwise"}, True),
        ({"acceptance": "blockwise", "blockwise": {"top_k": 2}}, False),
        ({"acceptance": "blockwise", "blockwise": {"distance": 1}}, False),
        ({"acceptance": "blockwise", "blockwise": {"minimum_block": 2}}, False),
        ({"acceptance": "rejection"}, True),
        ({"acceptance": "block"}, True),
    ],
)
def test_a_rule_says_whether_it_is_lossless(settings: dict[str, Any], is_lossless: bool) -> None:
    assert create_rule(load_configuration({"target": settings}).target).is_lossless is is_lossless


@pytest.mark.parametrize("name", RULES.names())
def test_settings_and_page_say_which_rules_are_lossy(name: str) -> None:
    rule = RULES.get(name)
    described = (rule.settings.__doc__ or "").startswith(("LOSSY", "NOT LOSSLESS"))
    pages = (TargetSection.model_fields["acceptance"].description or "", *KEEPING.findall(DRAFTS.read_text("utf-8")))
    named = [name in re.findall(r"`(\w+)`", page) for page in pages]
    assert rule.create(rule.settings()).is_lossless or described
    assert named == [not described, not described and name != "coupled"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("typical.epsilon", 0.0), ("typical.delta", -1.0), ("blockwise.top_k", 0), ("blockwise.minimum_block", 65)],
)
def test_settings_outside_their_bounds_are_refused(setting: str, value: float) -> None:
    rule, name = setting.split(".")
    with pytest.raises(ConfigurationError, match=name):
        load_configuration({"target": {rule: {name: value}}})


def test_missing_log_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="log_probabilities"):
        Typical(0.09, 0.3).accept(DecidedTree(EMPTY_TREE, [1], SAMPLED))


def test_rules_and_their_settings_are_read_without_torch() -> None:
    program = "import sys; from workers.sampling.acceptance import RULES; RULES.names(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
