"""Counts which tokens the target ranks highest after each token, for a table of successors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.model.drafting.table import SuccessorTable


def count_successors(table: SuccessorTable, answers: Iterable[Answer]) -> int:
    """Fill a table with the tokens that were most often among the target's most probable ones after each token.

    A token counts with the probability that the target gave it; the written token counts once where the target's
    probabilities are not stored. Returns the number of tokens that have successors. Raises `ConfigurationError` for a
    token outside the table.
    """
    counts: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for answer in answers:
        before = (answer.prompt[-1], *answer.answer[:-1])
        for place, token in enumerate(before):
            if answer.leading is None:
                counts[token][answer.answer[place]] += 1
                continue
            weights = torch.from_numpy(answer.leading.log_probabilities[place].astype("float32")).exp().tolist()
            for follower, weight in zip(answer.leading.tokens[place].tolist(), weights, strict=True):
                counts[token][follower] += weight
    size, width = table.successors.shape
    for token, followers in counts.items():
        best = sorted(followers, key=lambda each: -followers[each])[:width]
        if not all(0 <= each < size for each in (token, *best)):
            raise ConfigurationError(f"table: token {max(token, *best)} is refused; it must be below {size}")
        table.successors[token, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return len(counts)
