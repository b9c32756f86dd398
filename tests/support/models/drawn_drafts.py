"""Drafts for the enumerable model: drawn at random from a stated distribution, or deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from cluster.core.drafting import DraftDistribution
from cluster.core.request import SamplingParameters
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from tests.support.models.enumerable import LENGTH, PROMPT, TABLE, VOCABULARY, Answers, pair_after
from workers.sampling.acceptance import AcceptanceRule, Accepted, DecidedTree, RootPosition
from workers.sampling.context import DecisionContext
from workers.sampling.noise import gumbel
from workers.sampling.warp import log_distribution

NOISE = torch.randn(VOCABULARY**2, VOCABULARY, generator=torch.Generator().manual_seed(21))
TABLES = {
    "equal": TABLE,
    "similar": TABLE + 0.4 * NOISE,
    "unrelated": 2.0 * NOISE,
    "opposite": -TABLE,
}
"""Logits of draft models after each pair of tokens: float32 [pairs, vocabulary]."""


@dataclass(frozen=True)
class Draft:
    """A drafted tree, with the distributions that its tokens were drawn from; without any, it is deterministic."""

    tree: TokenTree = EMPTY_TREE
    distributions: tuple[DraftDistribution, ...] = ()


Drafter = Callable[[Sequence[int], int], Draft]
"""Makes the draft after these tokens for a sequence with this seed."""


def no_draft(tokens: Sequence[int], seed: int) -> Draft:
    """Plain decoding."""
    return Draft()


@dataclass(frozen=True)
class Drawing:
    """Draws `widths[d]` siblings without replacement below each node at depth `d`."""

    table: torch.Tensor
    widths: tuple[int, ...]
    is_renewed: bool = True
    """Whether each round has new random numbers; otherwise they depend on the position only."""
    kept: int = 4
    """Tokens of the truncated distributions."""

    def __call__(self, tokens: Sequence[int], seed: int) -> Draft:
        drawn: list[int] = []
        parents: list[int] = []
        distributions: list[DraftDistribution] = []
        level = [(ROOT, tuple(tokens))]
        for width in self.widths:
            below: list[tuple[int, tuple[int, ...]]] = []
            for parent, path in level:
                stated = self.distribution(pair_after(path))
                source = random.Random(f"{seed}/{len(tokens) if self.is_renewed else 0}/{len(path)}")
                for token in without_replacement(stated, width, source):
                    below.append((len(drawn), (*path, token)))
                    drawn.append(token)
                    parents.append(parent)
                    distributions.append(stated)
            level = below
        return Draft(TokenTree(tuple(drawn), tuple(parents)), tuple(distributions))

    def distribution(self, pair: int) -> DraftDistribution:
        return _truncated(tuple(self.table[pair].tolist()), self.kept)


@cache
def _truncated(logits: tuple[float, ...], kept: int) -> DraftDistribution:
    best = torch.tensor(logits).softmax(dim=0).topk(kept)
    return DraftDistribution(tuple(best.indices.tolist()), tuple((best.values / best.values.sum()).tolist()))


def without_replacement(stated: DraftDistribution, count: int, source: random.Random) -> list[int]:
    left = dict(zip(stated.tokens, stated.probabilities, strict=True))
    drawn: list[int] = []
    while len(drawn) < count and left:
        token = source.choices(list(left), list(left.values()))[0]
        del left[token]
        drawn.append(token)
    return drawn


@dataclass(frozen=True)
class WithSharedNoise:
    """Deterministic: the chain that the draft model writes with the target's own sampling noise."""

    table: torch.Tensor

    def __call__(self, tokens: Sequence[int], seed: int) -> Draft:
        path = list(tokens)
        positions = range(len(path), len(path) + LENGTH)
        for noise in gumbel([seed] * LENGTH, positions, 0, VOCABULARY, "cpu"):
            path.append(int((self.table[pair_after(path)] + noise).argmax()))
        return Draft(TokenTree.chain(path[len(tokens) :]))


def write(rule: AcceptanceRule, sampling: SamplingParameters, drafter: Drafter, seeds: int) -> tuple[Answers, float]:
    """The answers for the first `seeds` seeds, and the mean number of accepted tokens in the first round."""

    @cache
    def log_probabilities(tokens: tuple[int, ...]) -> torch.Tensor:
        return log_distribution(TABLE[[pair_after(tokens)]], [DecisionContext(sampling, tokens, len(PROMPT))])[0]

    answers: Answers = []
    accepted_first = 0
    for seed in range(seeds):
        tokens = PROMPT
        while len(tokens) < len(PROMPT) + LENGTH:
            draft = drafter(tokens, seed)
            paths = [(), *(draft.tree.path_tokens(node) for node in range(len(draft.tree)))]
            logs = torch.stack([log_probabilities((*tokens, *path)) for path in paths])
            root = RootPosition(seed, len(tokens), VOCABULARY)
            accepted: Accepted = rule.accept(DecidedTree(draft.tree, [0] * len(paths), root, logs, draft.distributions))
            accepted_first += len(accepted.nodes) if tokens == PROMPT else 0
            tokens = (*tokens, *accepted.tokens)
        answers.append(tokens[len(PROMPT) : len(PROMPT) + LENGTH])
    return answers, accepted_first / seeds
