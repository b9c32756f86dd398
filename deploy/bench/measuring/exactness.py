"""Compares the answers of a pass with those of plain decoding: equal, explained by rounding, or wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from deploy.bench.contestants.answers import BenchPass, PassRequest
from deploy.bench.measuring.results import Exactness
from workers.sampling.noise import gumbel_of

ROUNDING = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""How far apart the logits of two tokens may be for rounding to swap them, by the target's dtype.

Logits of language models are mostly between 8 and 32, where neighbouring bfloat16 numbers are up to 0.125 apart. Two
computations of one logit differ by a few such steps.
"""

Gap = Callable[[tuple[int, ...], int, int], Awaitable[float | None]]
"""By how much the target's logit of the first token exceeds that of the second, after a context."""


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where one of the answers ends; `None` if they are equal."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


@dataclass(frozen=True, slots=True)
class Judge:
    """How the answers of one contestant are compared."""

    bound: float
    """How far apart the logits of two tokens may be for rounding to swap them."""
    shares_noise: bool = True
    """Whether sampled answers come from the same random numbers as those of plain decoding."""


async def compare(request: PassRequest, plain: BenchPass, found: BenchPass, gap: Gap | None, judge: Judge) -> Exactness:
    """Classify the answers of a pass.

    A token is the target's choice by its logit, plus the noise of its position times the temperature (see
    `workers.sampling.noise`). `gap` is `None` where logits are unknown; then a difference is wrong.
    """
    if request.temperature > 0 and not judge.shares_noise:
        return Exactness(not_compared=len(found.answers))
    total = Exactness()
    for number, (prompt, expected, answer) in enumerate(
        zip(request.prompts, plain.answers, found.answers, strict=True)
    ):
        if not expected.tokens or not answer.tokens:
            total += _by_text(expected.text, answer.text)
            continue
        index = first_difference(expected.tokens, answer.tokens)
        if index is None:
            total += Exactness(equal=1)
        elif gap is None or index >= min(len(expected.tokens), len(answer.tokens)):
            total += Exactness(wrong=1)
        else:
            context, tokens = (*prompt.tokens, *expected.tokens[:index]), (expected.tokens[index], answer.tokens[index])
            logits = await gap(context, *tokens)
            noise = request.temperature * noise_gap(request.seed + number, len(context), *tokens)
            total += _explained(None if logits is None else abs(logits + noise), judge.bound)
    return total


def noise_gap(seed: int, position: int, expected: int, found: int) -> float:
    """By how much the noise of one token exceeds that of another at a position."""
    one, other = gumbel_of([seed], [position], torch.tensor([expected, found]), "cpu")[0].tolist()
    return float(one - other)


def _explained(difference: float | None, bound: float) -> Exactness:
    if difference is None:
        return Exactness(wrong=1)
    is_rounding = difference <= bound
    return Exactness(explained=int(is_rounding), wrong=int(not is_rounding), largest_gap=difference)


def _by_text(expected: str, found: str) -> Exactness:
    if not expected or not found:
        return Exactness(not_compared=1)
    return Exactness(equal=1) if expected == found else Exactness(not_compared=1)
