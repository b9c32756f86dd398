"""A language model small enough that the probability of every answer can be computed.

The next token depends on the last two tokens. The tests compare many sampled answers with these probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import torch
from scipy import stats

from cluster.core.request import SamplingParameters
from tests.support.models.sampling_reference import probabilities

BAR = 1e-4
"""p-values below this count as a wrong distribution."""
VOCABULARY = 5
LENGTH = 3
"""Tokens of an answer whose joint distribution is checked."""
PROMPT = (2, 4)
TABLE = torch.randn(VOCABULARY**2, VOCABULARY, generator=torch.Generator().manual_seed(20)) * 1.5
"""Logits after each pair of tokens: float32 [pairs, vocabulary]."""

Answers = list[tuple[int, ...]]


def pair_after(tokens: Sequence[int]) -> int:
    return tokens[-2] * VOCABULARY + tokens[-1]


SETTINGS = {
    "plain": SamplingParameters(),
    "temperature": SamplingParameters(temperature=0.6),
    "top-k": SamplingParameters(temperature=1.3, top_k=3),
    "top-p": SamplingParameters(top_p=0.8),
    "min-p": SamplingParameters(temperature=1.5, min_p=0.15),
    "penalties": SamplingParameters(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5, logit_bias=((1, 0.7),)
    ),
}


def p_value(sampling: SamplingParameters, answers: Answers) -> float:
    """Chi-square of the answers against the product of the warped probabilities; 0 for an impossible one."""
    expected: dict[tuple[int, ...], float] = {}
    for answer in product(range(VOCABULARY), repeat=LENGTH):
        tokens, probability = [*PROMPT], 1.0
        for token in answer:
            logits = TABLE[pair_after(tokens)].tolist()
            probability *= probabilities(logits, sampling, tokens, len(PROMPT))[token]
            tokens.append(token)
        expected[answer] = probability * len(answers)
    return chi_square(answers, expected)


def chi_square(answers: Iterable[tuple[int, ...]], expected: Mapping[tuple[int, ...], float]) -> float:
    """The probability of answers at least as far from their expected numbers; 0 for an impossible one.

    Answers that are expected fewer than five times share a cell.
    """
    seen = Counter(answers)
    if any(not expected.get(answer) for answer in seen):
        return 0.0
    total = sum(seen.values())
    cells = [answer for answer, count in expected.items() if count >= 5]
    counts = [seen[answer] for answer in cells]
    means = [expected[answer] for answer in cells]
    rest = total - sum(means)
    if rest > 1e-6 * total:
        counts.append(total - sum(counts))
        means.append(rest)
    return float(stats.chisquare(counts, means, sum_check=False).pvalue)
