"""How often what followed some words before follows them again: learned by the length of the match and who agrees."""

from __future__ import annotations

from enum import Enum


class Agreement(Enum):
    """What the model makes of a token that was looked up."""

    UNASKED = 0
    """It has not been asked yet."""
    FIRST = 1
    """It is its first guess."""
    LATER = 2
    """It is among its guesses."""
    NONE = 3
    """It is not."""


Lookup = tuple[int, Agreement, bool]
"""The tokens that match, what the model makes of it, and whether tokens are taken without noise."""

_LONGEST = 8
"""Longer matches share this one's counts."""
_PRIOR = (0.3, 0.45, 0.55, 0.62, 0.7, 0.78, 0.84, 0.88)
"""Before anything is known, by the tokens that match, where the model was not asked."""
_WEIGHT = 6.0
"""What the prior is worth, in lookups."""
_FADING = 0.998


class Lookups:
    """From matches to chances, and what commits teach of them."""

    def __init__(self) -> None:
        self._hits: dict[Lookup, float] = {}
        self._trials: dict[Lookup, float] = {}

    def chance(self, match: int, agreement: Agreement, is_greedy: bool) -> float:
        """That the token follows which followed `match` equal tokens before."""
        key = min(match, _LONGEST), agreement, is_greedy
        prior = _prior(*key)
        return (_WEIGHT * prior + self._hits.get(key, 0.0)) / (_WEIGHT + self._trials.get(key, 0.0))

    def observe(self, match: int, agreement: Agreement, is_greedy: bool, hit: bool) -> None:
        """The target has decided: it took the token (`hit`) or another."""
        key = min(match, _LONGEST), agreement, is_greedy
        self._hits[key] = self._hits.get(key, 0.0) * _FADING + hit
        self._trials[key] = self._trials.get(key, 0.0) * _FADING + 1.0


def _prior(match: int, agreement: Agreement, is_greedy: bool) -> float:
    """Two that agree are right where either is; one that is contradicted loses half of its weight."""
    alone = _PRIOR[match - 1] * (1.0 if is_greedy else 0.7)
    return {
        Agreement.UNASKED: alone,
        Agreement.FIRST: 1.0 - (1.0 - alone) * 0.4,
        Agreement.LATER: alone * 0.7,
        Agreement.NONE: alone * 0.5,
    }[agreement]
