"""`rejection` and `block` sample from the target's distribution, whatever is drafted; wrong variants are detected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from cluster.core.tree import ROOT
from tests.support.models.drawn_drafts import TABLES, Draft, Drafter, Drawing, WithSharedNoise, no_draft, write
from tests.support.models.enumerable import BAR, SETTINGS, VOCABULARY, p_value
from workers.sampling.acceptance import AcceptanceRule, Accepted, DecidedTree
from workers.sampling.noise import gumbel
from workers.sampling.residual import draft_probabilities
from workers.sampling.rules.block import Block
from workers.sampling.rules.rejection import Rejection
from workers.sampling.uniform import uniform

pytestmark = pytest.mark.slow

SEEDS = 2000
CHAIN, TREE = (1, 1, 1), (3, 2, 1)
REJECTION, BLOCK = Rejection(), Block()

CASES: dict[str, tuple[AcceptanceRule, str, Drafter]] = {
    "rejection, no draft": (REJECTION, "plain", no_draft),
    "rejection, chain, similar": (REJECTION, "temperature", Drawing(TABLES["similar"], CHAIN)),
    "rejection, tree, unrelated": (REJECTION, "top-k", Drawing(TABLES["unrelated"], TREE)),
    "rejection, tree, opposite": (REJECTION, "top-p", Drawing(TABLES["opposite"], TREE)),
    "rejection, tree, equal": (REJECTION, "penalties", Drawing(TABLES["equal"], TREE)),
    "rejection, deterministic": (REJECTION, "min-p", WithSharedNoise(TABLES["similar"])),
    "block, chain, similar": (BLOCK, "plain", Drawing(TABLES["similar"], CHAIN)),
    "block, chain, equal": (BLOCK, "temperature", Drawing(TABLES["equal"], CHAIN)),
    "block, chain, unrelated": (BLOCK, "top-k", Drawing(TABLES["unrelated"], CHAIN)),
    "block, chain, opposite": (BLOCK, "penalties", Drawing(TABLES["opposite"], CHAIN)),
    "block, tree, similar": (BLOCK, "top-p", Drawing(TABLES["similar"], TREE)),
    "block, deterministic": (BLOCK, "min-p", WithSharedNoise(TABLES["similar"])),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_follow_the_targets_distribution(case: str) -> None:
    rule, setting, drafter = CASES[case]
    answers, accepted = write(rule, SETTINGS[setting], drafter, SEEDS)
    assert p_value(SETTINGS[setting], answers) > BAR
    if drafter is not no_draft:
        assert 0.0 < accepted < 3.0


def test_a_draft_from_the_targets_own_distribution_is_accepted_whole() -> None:
    drafter = Drawing(TABLES["equal"], CHAIN, kept=VOCABULARY)
    for rule in (REJECTION, BLOCK):
        assert write(rule, SETTINGS["plain"], drafter, 200)[1] == pytest.approx(3.0, abs=0.02)


def test_siblings_raise_the_number_of_accepted_tokens() -> None:
    one, three = (
        write(REJECTION, SETTINGS["plain"], Drawing(TABLES["unrelated"], widths), 1000)[1]
        for widths in (CHAIN, (3, 1, 1))
    )
    assert three > one + 0.2


@pytest.mark.parametrize("draft", ["similar", "unrelated"])
def test_block_accepts_more_tokens_of_chains_than_rejection(draft: str) -> None:
    """The same drafts are verified by both rules."""
    drafter = Drawing(TABLES[draft], CHAIN)
    by_token, by_block = (write(rule, SETTINGS["plain"], drafter, SEEDS)[1] for rule in (REJECTION, BLOCK))
    assert by_block > by_token


# --- the tests detect wrong rules -----------------------------------------------------------------


@dataclass(frozen=True)
class SimpleRejection:
    """Rejection sampling in a few lines, with parts that a test can leave out."""

    subtracts: bool = True
    """Whether a rejection leaves max(p − q, 0) instead of p."""
    normalises: bool = True
    """Whether the rest is normalised before the next sibling is tried."""
    removes: bool = True
    """Whether an earlier sibling's token is removed from q."""
    has_own_numbers: bool = True
    """Whether the token after a rejection is drawn independently of the noise that drafts are drawn with."""
    is_lossless: bool = field(default=True, init=False)
    needs_distribution: bool = field(default=True, init=False)

    def accept(self, step: DecidedTree) -> Accepted:
        tree, root, log_probabilities = step.tree, step.root, step.known_log_probabilities
        nodes: list[int] = []
        while True:
            node, position = nodes[-1] if nodes else ROOT, root.position + len(nodes)
            left, rejected = log_probabilities[node + 1].double().exp(), list[int]()
            for rank, child in enumerate(tree.children(node)):
                token = tree.tokens[child]
                draft: Mapping[int, float] = draft_probabilities(tree, child, step.distributions, rejected)
                if uniform(b"rejection", root.seed, position, rank) * draft[token] < float(left[token]):
                    nodes.append(child)
                    break
                if self.removes:
                    rejected.append(token)
                rest = left.clone()
                for other, probability in draft.items():
                    rest[other] = max(0.0, float(left[other]) - probability)
                if self.subtracts and float(rest.sum()) > 0:
                    left = rest / rest.sum() if self.normalises else rest
            else:
                if self.has_own_numbers:
                    number = uniform(b"residual", root.seed, position)
                    last = int((left.cumsum(0) <= number * left.sum()).sum())
                else:
                    last = int((left.log() + gumbel([root.seed], [position], 0, VOCABULARY, "cpu")[0]).argmax())
                return step.accepted(nodes, last)


def without_improbable_tokens(drafter: Drafter) -> Drafter:
    """Wrong: whether a drawn token is verified depends on its probability."""

    def drawn(tokens: Sequence[int], seed: int) -> Draft:
        draft = drafter(tokens, seed)
        kept: list[int] = []
        for node, (token, parent) in enumerate(zip(draft.tree.tokens, draft.tree.parents, strict=True)):
            stated = draft.distributions[node]
            is_probable = stated.probabilities[stated.tokens.index(token)] > 0.3
            if is_probable and (parent == ROOT or parent in kept):
                kept.append(node)
        return Draft(draft.tree.subset(kept), tuple(draft.distributions[node] for node in kept))

    return drawn


TREE_OF_UNRELATED, TREE_OF_SIMILAR = Drawing(TABLES["unrelated"], TREE), Drawing(TABLES["similar"], TREE)
WRONG: dict[str, tuple[AcceptanceRule, Drafter]] = {
    "p is not reduced by a rejection": (SimpleRejection(subtracts=False), TREE_OF_UNRELATED),
    "the rest is not normalised": (SimpleRejection(normalises=False), TREE_OF_UNRELATED),
    "siblings are not removed": (SimpleRejection(removes=False), TREE_OF_UNRELATED),
    "the draft's noise is used again": (
        SimpleRejection(has_own_numbers=False),
        WithSharedNoise(TABLES["unrelated"]),
    ),
    "improbable tokens are not verified": (REJECTION, without_improbable_tokens(TREE_OF_SIMILAR)),
    "improbable tokens are not verified in blocks": (
        BLOCK,
        without_improbable_tokens(Drawing(TABLES["similar"], CHAIN)),
    ),
    "blocks draw the same numbers in each round": (BLOCK, Drawing(TABLES["similar"], CHAIN, is_renewed=False)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_detected(name: str) -> None:
    rule, drafter = WRONG[name]
    answers, _ = write(rule, SETTINGS["plain"], drafter, 2 * SEEDS)
    assert p_value(SETTINGS["plain"], answers) < BAR


def test_the_simple_rule_without_faults_accepts_the_same_tokens() -> None:
    for drafter in (TREE_OF_UNRELATED, TREE_OF_SIMILAR, WithSharedNoise(TABLES["unrelated"])):
        simple, packaged = (write(rule, SETTINGS["plain"], drafter, 300) for rule in (SimpleRejection(), REJECTION))
        assert simple == packaged
