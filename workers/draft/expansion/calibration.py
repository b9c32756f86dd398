"""How often the target takes what the draft was so sure of: learned from every commit.

A draft's confidence is its own; the chance that the target takes the token is another number. It is counted apart for
greedy and drawn tokens, after a first guess that was right and after anything else (text is easy or hard in stretches),
for the guess's rank among its siblings, and for bins of the confidence; old counts fade.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from workers.draft.expansion.lookup_acceptance import Lookups

TRUST = 0.8
"""Before anything is known: a small model is right somewhat less often than it believes."""
_EDGES = (0.03, 0.08, 0.18, 0.35, 0.55, 0.75, 0.92)
"""Between the bins of confidence."""
_RANKS = 4
"""Guesses of a later rank share the last one's counts."""
_TRUST_WEIGHT = 4.0
"""What the trust to begin with is worth, in right guesses."""
_RANK_WEIGHT = 12.0
"""What the rank's own rate is worth to each of its bins, in guesses."""
_FADING = 0.998
"""What a count keeps of its weight with each that follows it."""
_HOPE = 0.6
_HOPE_FADING = 0.99


@dataclass(frozen=True, slots=True)
class Kind:
    """What guesses are counted apart by."""

    is_greedy: bool
    """Whether the target takes its most probable token, without noise."""
    is_streak: bool
    """Whether the token before them was itself a first guess."""


KINDS = {
    (is_greedy, is_streak): Kind(is_greedy, is_streak) for is_greedy in (False, True) for is_streak in (False, True)
}
"""All there are."""


class _Rank:
    """Counts of the guesses of one rank."""

    __slots__ = ("hits", "right", "sure", "trials")

    def __init__(self, trust: float) -> None:
        self.right = trust * _TRUST_WEIGHT
        """Guesses that the target took."""
        self.sure = _TRUST_WEIGHT
        """Guesses that it would have taken were the model always right: the sum of its confidences."""
        self.hits = [0.0] * (len(_EDGES) + 1)
        self.trials = [0.0] * (len(_EDGES) + 1)


class Calibration:
    """From confidences to chances, and what commits teach of them.

    Before any, a guess is right as often as it is sure, times `trust`. The ratio is learned for each rank first, from
    all its guesses; where a bin has many, they speak for themselves.
    """

    def __init__(self, trust: float = TRUST) -> None:
        self._ranks = {kind: [_Rank(trust) for _ in range(_RANKS)] for kind in KINDS.values()}
        self._hopes = dict.fromkeys(KINDS.values(), _HOPE)
        self.lookups = Lookups()
        """Of tokens that were looked up."""

    def chances(self, confidences: Sequence[float], kind: Kind) -> list[float]:
        """The chance of each sibling, likeliest guess first, to be what the target takes: 1 together at most."""
        ranks = self._ranks[kind]
        found: list[float] = []
        for place, confidence in enumerate(confidences):
            rank, column = ranks[min(place, _RANKS - 1)], bisect(_EDGES, confidence)
            usual = min(1.0, max(0.0, confidence) * rank.right / rank.sure)
            found.append((_RANK_WEIGHT * usual + rank.hits[column]) / (_RANK_WEIGHT + rank.trials[column]))
        total = sum(found)
        return [chance / total for chance in found] if total > 1.0 else found

    def observe(self, confidences: Sequence[float], taken: int | None, kind: Kind) -> None:
        """The target has decided among these siblings: it took the one in place `taken`, or none of them."""
        ranks = self._ranks[kind]
        for place, confidence in enumerate(confidences):
            rank, column, hit = ranks[min(place, _RANKS - 1)], bisect(_EDGES, confidence), float(place == taken)
            rank.hits[column] = rank.hits[column] * _FADING + hit
            rank.trials[column] = rank.trials[column] * _FADING + 1.0
            rank.right = rank.right * _FADING + hit
            rank.sure = rank.sure * _FADING + confidence
        self._hopes[kind] += (1.0 - _HOPE_FADING) * ((taken == 0) - self._hopes[kind])

    def hope(self, kind: Kind) -> float:
        """How often the target takes the first guess, whatever its confidence."""
        return self._hopes[kind]
