"""Learns how often the target takes a looked-up token, by match length and by the model's agreement."""

from __future__ import annotations

from enum import Enum


class Agreement(Enum):
    """The position of a looked-up token among the model's candidates."""

    UNKNOWN = 0
    """The model has drafted no candidates at this position yet."""
    FIRST = 1
    """The token is the model's first candidate."""
    LATER = 2
    """The token is a later candidate of the model."""
    ABSENT = 3
    """The token is not among the model's candidates."""


LookupKey = tuple[int, Agreement, bool]
"""Number of matching tokens, the model's agreement, and whether the target decodes greedily."""

_LONGEST = 8
"""Longer matches share the counts of this length."""
_PRIOR = (0.3, 0.45, 0.55, 0.62, 0.7, 0.78, 0.84, 0.88)
"""Acceptance rate assumed before any observation, by match length from 1, where the model's candidates are unknown."""
_PRIOR_WEIGHT = 6.0
"""Weight of the assumed rate, in observations."""
_DECAY = 0.998
"""Factor by which each observation reduces the weight of earlier ones."""


class LookupAcceptance:
    """Acceptance rates of looked-up tokens, updated by every decision of the target."""

    def __init__(self) -> None:
        self._hits: dict[LookupKey, float] = {}
        self._trials: dict[LookupKey, float] = {}

    def probability(self, match_length: int, agreement: Agreement, is_greedy: bool) -> float:
        """Probability that the target takes the token that followed `match_length` equal tokens earlier."""
        key = min(match_length, _LONGEST), agreement, is_greedy
        return (_PRIOR_WEIGHT * _prior(*key) + self._hits.get(key, 0.0)) / (_PRIOR_WEIGHT + self._trials.get(key, 0.0))

    def observe(self, match_length: int, agreement: Agreement, is_greedy: bool, hit: bool) -> None:
        """Record whether the target took the token (`hit`) or another one."""
        key = min(match_length, _LONGEST), agreement, is_greedy
        self._hits[key] = self._hits.get(key, 0.0) * _DECAY + hit
        self._trials[key] = self._trials.get(key, 0.0) * _DECAY + 1.0


def _prior(match_length: int, agreement: Agreement, is_greedy: bool) -> float:
    """The assumed rate: higher where the model agrees, lower where it does not or where the target samples."""
    base = _PRIOR[match_length - 1] * (1.0 if is_greedy else 0.7)
    return {
        Agreement.UNKNOWN: base,
        Agreement.FIRST: 1.0 - (1.0 - base) * 0.4,
        Agreement.LATER: base * 0.7,
        Agreement.ABSENT: base * 0.5,
    }[agreement]
