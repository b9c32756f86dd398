"""Converts the draft model's confidence in a token to the probability that the target takes it.

The calibration learns the relation of the two from every decision of the target. It keeps separate counts for
greedy and sampled decoding, for candidates below an accepted first candidate and below anything else (easy and hard
text comes in stretches), for the rank among siblings, and for bins of the confidence. Older counts decay.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from workers.draft.common.trees.lookup_acceptance import LookupAcceptance

PRIOR_TRUST = 0.8
"""Acceptance rate per unit of confidence before any observation: small models are somewhat overconfident."""
_EDGES = (0.03, 0.08, 0.18, 0.35, 0.55, 0.75, 0.92)
"""Edges between the bins of confidence."""
_RANKS = 4
"""Number of ranks with counts of their own; later ranks share the last one's."""
_PRIOR_WEIGHT = 4.0
"""Weight of the prior, in summed confidence."""
_RANK_WEIGHT = 12.0
"""Weight of a rank's overall rate in each of its bins, in candidates."""
_DECAY = 0.998
"""Factor by which each observation reduces the weight of earlier ones."""
_FIRST_RATE_PRIOR = 0.6
_FIRST_RATE_DECAY = 0.99


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of candidates. The calibration has separate counts for each kind."""

    is_greedy: bool
    """Whether the target decodes greedily."""
    is_streak: bool
    """Whether the token before the candidates was itself a first candidate."""


KINDS = {
    (is_greedy, is_streak): Kind(is_greedy, is_streak) for is_greedy in (False, True) for is_streak in (False, True)
}
"""All kinds, by `is_greedy` and `is_streak`."""


class _RankCounts:
    """Counts of the candidates of one rank."""

    __slots__ = ("accepted", "confidence", "hits", "trials")

    def __init__(self, trust: float) -> None:
        self.accepted = trust * _PRIOR_WEIGHT
        """Number of candidates that the target took."""
        self.confidence = _PRIOR_WEIGHT
        """Sum of the confidences of all candidates: the number the target would take if confidences were exact."""
        self.hits = [0.0] * (len(_EDGES) + 1)
        """Number of accepted candidates in each bin of confidence."""
        self.trials = [0.0] * (len(_EDGES) + 1)
        """Number of candidates in each bin of confidence."""


class Calibration:
    """Acceptance probabilities of candidates, updated by every decision of the target.

    Before any observation the probability is the confidence times `trust`. The ratio is learned for each rank first;
    a bin of confidence with many observations overrides it.
    """

    def __init__(self, trust: float = PRIOR_TRUST) -> None:
        self._ranks = {kind: [_RankCounts(trust) for _ in range(_RANKS)] for kind in KINDS.values()}
        self._first_rates = dict.fromkeys(KINDS.values(), _FIRST_RATE_PRIOR)
        self.lookups = LookupAcceptance()
        """Acceptance rates of looked-up tokens."""

    def probabilities(self, confidences: Sequence[float], kind: Kind) -> list[float]:
        """The probability that the target takes each sibling, in order of rank; the sum is at most 1."""
        ranks = self._ranks[kind]
        found: list[float] = []
        for index, confidence in enumerate(confidences):
            rank, column = ranks[min(index, _RANKS - 1)], bisect(_EDGES, confidence)
            usual = min(1.0, max(0.0, confidence) * rank.accepted / rank.confidence)
            found.append((_RANK_WEIGHT * usual + rank.hits[column]) / (_RANK_WEIGHT + rank.trials[column]))
        total = sum(found)
        return [probability / total for probability in found] if total > 1.0 else found

    def observe(self, confidences: Sequence[float], taken: int | None, kind: Kind) -> None:
        """Record that the target took the sibling with index `taken`, or none of them."""
        ranks = self._ranks[kind]
        for index, confidence in enumerate(confidences):
            rank, column, hit = ranks[min(index, _RANKS - 1)], bisect(_EDGES, confidence), float(index == taken)
            rank.hits[column] = rank.hits[column] * _DECAY + hit
            rank.trials[column] = rank.trials[column] * _DECAY + 1.0
            rank.accepted = rank.accepted * _DECAY + hit
            rank.confidence = rank.confidence * _DECAY + confidence
        self._first_rates[kind] += (1.0 - _FIRST_RATE_DECAY) * ((taken == 0) - self._first_rates[kind])

    def first_rate(self, kind: Kind) -> float:
        """The rate at which the target takes the first candidate, whatever its confidence."""
        return self._first_rates[kind]
