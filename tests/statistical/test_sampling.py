"""Sampling is correct: the noise has the Gumbel distribution, and speculation samples from the warped distribution.

Seeds are fixed, so every run computes the same p-values. With a threshold of 10⁻⁴, a deliberate change to a constant of
the noise rarely fails by chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
import pytest
import torch
from scipy import stats

from cluster.core.request import SamplingParameters
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.models.enumerable import (
    BAR,
    LENGTH,
    PROMPT,
    SETTINGS,
    TABLE,
    VOCABULARY,
    Answers,
    p_value,
    pair_after,
)
from workers.sampling.acceptance import Accepted, DecidedTree
from workers.sampling.context import Branch, DecisionContext, tree_contexts
from workers.sampling.decide import decide
from workers.sampling.noise import gumbel

pytestmark = pytest.mark.slow

SEEDS = 20_000
WITH_DRAFTS = 4_000
"""Seeds whose answers are also written with drafts."""

# --- the noise --------------------------------------------------------------------------------


def uniforms(seeds: Sequence[int], positions: Sequence[int], size: int, first: int = 0) -> numpy.ndarray:
    """The noise mapped back to the unit interval: float64 [n, size]."""
    return numpy.exp(-numpy.exp(-gumbel(seeds, positions, first, size, "cpu").double().numpy()))


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel([3] * 100, range(100), 0, 10_000, "cpu").double().numpy().ravel()
    assert stats.kstest(noise, "gumbel_r").pvalue > BAR
    deviation = math.pi / math.sqrt(6)
    assert abs(noise.mean() - 0.5772156649) < 4 * deviation / math.sqrt(noise.size)
    assert abs(noise.var() / deviation**2 - 1) < 4 * math.sqrt(4.4 / noise.size)  # excess kurtosis is 2.4


def test_the_maximum_of_many_noises_has_the_gumbel_distribution() -> None:
    noise = gumbel([5] * 4000, range(4000), 0, 1000, "cpu").amax(dim=1).double().numpy()
    assert stats.kstest(noise - math.log(1000), "gumbel_r").pvalue > BAR


def test_uniforms_fill_all_bins_equally() -> None:
    drawn = uniforms(range(100), [0] * 100, 10_000)
    counts = numpy.histogram(drawn, bins=4096, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > BAR


ROWS = range(200)
FIXED = [9] * 200
NEIGHBOURS = {  # seeds, positions and first token of both sides
    "next token": ((ROWS, FIXED, 0), (ROWS, FIXED, 1)),
    "distant token": ((ROWS, FIXED, 0), (ROWS, FIXED, 1 << 16)),
    "next position": ((FIXED, ROWS, 0), (FIXED, range(1, 201), 0)),
    "next seed": ((ROWS, FIXED, 0), (range(1, 201), FIXED, 0)),
    "highest bit of the seed": ((ROWS, FIXED, 0), (range(1 << 63, (1 << 63) + 200), FIXED, 0)),
    "seed and position exchanged": ((ROWS, range(200, 400), 0), (range(200, 400), ROWS, 0)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name: str) -> None:
    left, right = (uniforms(seeds, positions, 5000, first).ravel() for seeds, positions, first in NEIGHBOURS[name])
    counts = numpy.histogram2d(left, right, bins=32, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(counts.ravel()).pvalue > BAR


def test_decisions_over_equal_logits_are_uniform_and_independent_between_positions() -> None:
    winners = gumbel([8] * 40_000, range(40_000), 0, 16, "cpu").argmax(dim=1).numpy()
    assert stats.chisquare(numpy.bincount(winners, minlength=16)).pvalue > BAR
    pairs = numpy.bincount(winners[:-1] * 16 + winners[1:], minlength=256)
    assert stats.chisquare(pairs).pvalue > BAR


# --- the speculation loop -----------------------------------------------------------------------

Decide = Callable[[torch.Tensor, Sequence[DecisionContext]], list[int]]
Walk = Callable[[TokenTree, Sequence[int]], Accepted]


@dataclass(frozen=True, slots=True)
class Drafter:
    """Drafts for the answer of one seed. It knows the answer of plain decoding."""

    plain: tuple[int, ...]
    """The answer by plain decoding."""
    seed: int

    def right(self, done: int) -> tuple[int, ...]:
        return self.plain[done:]

    def wrong(self, done: int, by: int = 1) -> tuple[int, ...]:
        return tuple((token + by) % VOCABULARY for token in self.plain[done : done + 2])

    def always_agree_chain(self, done: int) -> TokenTree:
        return TokenTree.chain(self.right(done))

    def always_agree_tree(self, done: int) -> TokenTree:
        right = self.right(done)
        return TokenTree.from_candidates([self.wrong(done), right[:1] + self.wrong(done)[1:], right], max_nodes=16)

    def never_agree_chain(self, done: int) -> TokenTree:
        return TokenTree.chain(self.wrong(done))

    def never_agree_tree(self, done: int) -> TokenTree:
        return TokenTree.from_candidates([self.wrong(done, by) for by in (1, 2)], max_nodes=16)

    def random_chain(self, done: int) -> TokenTree:
        source = random.Random(self.seed * 7 + done)
        return TokenTree.chain(source.choices(range(VOCABULARY), k=source.randrange(4)))

    def random_tree(self, done: int) -> TokenTree:
        source = random.Random(self.seed * 11 + done)
        candidates = [source.choices(range(VOCABULARY), k=source.randrange(1, 4)) for _ in range(3)]
        return TokenTree.from_candidates(candidates, max_nodes=5)

    def nothing(self, done: int) -> TokenTree:
        return EMPTY_TREE


Draft = Callable[[Drafter, int], TokenTree]
DRAFTS: dict[str, Draft] = {
    "always-agree chain": Drafter.always_agree_chain,
    "always-agree tree": Drafter.always_agree_tree,
    "never-agree chain": Drafter.never_agree_chain,
    "never-agree tree": Drafter.never_agree_tree,
    "random chain": Drafter.random_chain,
    "random tree": Drafter.random_tree,
}


def walk(tree: TokenTree, decisions: Sequence[int]) -> Accepted:
    """What the rule `coupled` accepts."""
    return DecidedTree(tree, decisions).walk()


def speculate(
    sampling: SamplingParameters,
    drafters: Sequence[Drafter],
    draft: Draft,
    decide_rows: Decide = decide,
    accept: Walk = walk,
) -> Answers:
    """The speculation loop for all drafters' seeds in one batch: draft, decide at every node, walk, commit."""
    samplings = [replace(sampling, seed=drafter.seed) for drafter in drafters]
    answers: list[list[int]] = [[] for _ in drafters]
    running = list(range(len(drafters)))
    while running:
        trees = [draft(drafters[index], len(answers[index])) for index in running]
        contexts: list[DecisionContext] = []
        for index, tree in zip(running, trees, strict=True):
            contexts.extend(tree_contexts(samplings[index], [*PROMPT, *answers[index]], len(PROMPT), tree))
        logits = TABLE[[pair_after(context.tokens[-2:]) for context in contexts]]
        decisions = decide_rows(logits, contexts)
        first = 0
        for index, tree in zip(running, trees, strict=True):
            last = first + len(tree) + 1
            answers[index].extend(accept(tree, decisions[first:last]).tokens)
            first = last
        running = [index for index in running if len(answers[index]) < LENGTH]
    return [tuple(answer[:LENGTH]) for answer in answers]


def plain_answers(sampling: SamplingParameters, seeds: int) -> Answers:
    return speculate(sampling, [Drafter((), seed) for seed in range(seeds)], Drafter.nothing)


def drafters_for(plain: Answers) -> list[Drafter]:
    return [Drafter(answer, seed) for seed, answer in enumerate(plain)]


# --- the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "draft"), list(zip(SETTINGS, DRAFTS, strict=True)))
def test_twenty_thousand_answers_follow_the_warped_distribution(setting: str, draft: str) -> None:
    """Drafts change none of them."""
    sampling = SETTINGS[setting]
    plain = plain_answers(sampling, SEEDS)
    assert p_value(sampling, plain) > BAR
    speculated = speculate(sampling, drafters_for(plain[:WITH_DRAFTS]), DRAFTS[draft])
    assert p_value(sampling, speculated) > BAR
    assert speculated == plain[:WITH_DRAFTS]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_drafter_yields_the_tokens_of_plain_decoding(setting: str) -> None:
    sampling = SETTINGS[setting]
    plain = plain_answers(sampling, 200)
    for draft in DRAFTS.values():
        assert speculate(sampling, drafters_for(plain), draft) == plain


def test_all_greedy_answers_are_equal() -> None:
    sampling = SamplingParameters(temperature=0.0)
    plain = plain_answers(sampling, 20)
    tokens = [*PROMPT]
    for _ in range(LENGTH):
        tokens.append(int(TABLE[pair_after(tokens)].argmax()))
    assert set(plain) == {tuple(tokens[len(PROMPT) :])}
    assert all(speculate(sampling, drafters_for(plain), draft) == plain for draft in DRAFTS.values())


# --- the tests detect wrong rules -----------------------------------------------------------------


def decide_with_noise_by_step(logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> list[int]:
    """Wrong: all nodes of a step share the noise of its first position."""
    roots: list[DecisionContext] = []
    for context in contexts:
        roots.append(roots[-1] if isinstance(context.tokens, Branch) else context)
    return decide(logits, roots)


def walk_that_trusts_the_first_child(tree: TokenTree, decisions: Sequence[int]) -> Accepted:
    """Wrong: a drafted token is accepted without the target's decision."""
    return Accepted((0,), (tree.tokens[0], decisions[1])) if len(tree) else walk(tree, decisions)


def decide_without_temperature(logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> list[int]:
    """Wrong: logits are not warped."""
    return decide(logits, [replace(item, sampling=replace(item.sampling, temperature=1.0)) for item in contexts])


@pytest.mark.parametrize(
    ("draft", "wrong_decide", "wrong_walk"),
    [
        pytest.param(Drafter.always_agree_chain, decide_with_noise_by_step, walk, id="noise by step"),
        pytest.param(Drafter.random_chain, decide, walk_that_trusts_the_first_child, id="drafts accepted unverified"),
        pytest.param(Drafter.random_tree, decide_without_temperature, walk, id="no temperature"),
    ],
)
def test_a_wrong_rule_is_detected(draft: Draft, wrong_decide: Decide, wrong_walk: Walk) -> None:
    sampling = SETTINGS["temperature"]
    plain = plain_answers(sampling, 4000)
    speculated = speculate(sampling, drafters_for(plain), draft, wrong_decide, wrong_walk)
    assert p_value(sampling, plain) > BAR
    assert p_value(sampling, speculated) < BAR
    assert speculated != plain
