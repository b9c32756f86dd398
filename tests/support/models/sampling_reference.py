"""A slow reference in plain Python for the logits processors of `workers.sampling`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cluster.core.request import SamplingParameters


def shifted(
    logits: Sequence[float], sampling: SamplingParameters, tokens: Sequence[int], prompt_len: int
) -> list[float]:
    """Logits after penalties and bias."""
    values = list(logits)
    for token in set(tokens):
        values[token] *= 1 / sampling.repetition_penalty if values[token] > 0 else sampling.repetition_penalty
    for token, count in Counter(tokens[prompt_len:]).items():
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias:
        values[token] += bias
    return values


def probabilities(
    logits: Sequence[float], sampling: SamplingParameters, tokens: Sequence[int], prompt_len: int
) -> list[float]:
    """The distribution that a token is drawn from. At temperature 0 one token has all the mass."""
    values = shifted(logits, sampling, tokens, prompt_len)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(len(values))]
    weights = [math.exp((value - values[order[0]]) / sampling.temperature) for value in values]
    kept = order[: sampling.top_k or None]
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < sampling.top_p * sum(weights[token] for token in kept) or sampling.top_p == 1:
            nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= sampling.min_p]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(values))]


def nucleus_is_near_its_edge(probabilities: Sequence[float], top_p: float) -> bool:
    """Whether rounding decides if one more token belongs to the nucleus."""
    mass = 0.0
    for probability in sorted(probabilities, reverse=True):
        mass += probability
        if abs(mass - top_p) < 1e-5:
            return True
    return False
