"""Candidates of greedy rows from one pass over their logits, which the general way copies and sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from workers.forward.native.largest import Largest
from workers.sampling.candidates import Candidate
from workers.sampling.context import DecisionContext, leaders_of

_LEAST_MASS = 1e-3
"""Smallest probability that excluded tokens may leave to the others. Less of it is not known well enough."""


class GreedyCandidates:
    """Finds the candidates of rows in which logits alone decide, apart from excluded tokens."""

    def __init__(self, largest: Largest, vocabulary: Tensor | None) -> None:
        """`vocabulary`, int64 [size], ascending, are the tokens of the logits; `None` means all."""
        self._largest = largest
        self._tokens: list[int] | None = None if vocabulary is None else vocabulary.tolist()
        self._columns: dict[int, int] = {token: column for column, token in enumerate(self._tokens or ())}

    def of(self, logits: Tensor, contexts: Sequence[DecisionContext], count: int) -> list[tuple[Candidate, ...]] | None:
        """The best `count` tokens at each row's position, as `candidates` returns them, from float32 [n, size] on CPU.

        `None` where the general way is needed.
        """
        if any(context.allowed is not None or not leaders_of(context.sampling) for context in contexts):
            return None
        excluded = [set(context.excluded_tokens) for context in contexts]
        wanted = min(count + max(map(len, excluded), default=0), logits.shape[1])
        values, columns, totals = self._largest(logits, wanted)
        found: list[tuple[Candidate, ...]] = []
        rows = zip(values.tolist(), columns.tolist(), totals.tolist(), excluded, strict=True)
        for row, (scores, places, (total,), without) in enumerate(rows):
            lost = sum(math.exp(float(logits[row, at]) - total) for at in map(self._column, without) if at is not None)
            if not lost < 1.0 - _LEAST_MASS or not math.isfinite(scores[0]):
                return None
            tokens = places if self._tokens is None else [self._tokens[place] for place in places]
            best = [
                Candidate(token, math.exp(score - total) / (1.0 - lost))
                for token, score in zip(tokens, scores, strict=True)
                if token not in without and score > -math.inf
            ]
            found.append(tuple(best[:count]))
        return found

    def _column(self, token: int) -> int | None:
        """The column of a token's logit; `None` if there is none."""
        return token if self._tokens is None else self._columns.get(token)
