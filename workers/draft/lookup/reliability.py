"""Learns how often the target takes a looked-up token of a given estimated probability."""

from __future__ import annotations

_BINS = 16
_PRIOR_WEIGHT = 8.0
"""Weight of the estimate itself, in observations."""
_DECAY = 0.995
"""Factor by which each observation reduces the weight of earlier ones in its bin."""


class Reliability:
    """Acceptance rates by estimated probability, in `_BINS` bins. Before any observation the estimate is the rate."""

    __slots__ = ("_hits", "_trials")

    def __init__(self) -> None:
        self._hits = [0.0] * _BINS
        self._trials = [0.0] * _BINS

    def probability(self, estimate: float) -> float:
        """The probability that the target takes a token with this estimate, both in [0, 1]."""
        index = min(int(estimate * _BINS), _BINS - 1)
        return (_PRIOR_WEIGHT * estimate + self._hits[index]) / (_PRIOR_WEIGHT + self._trials[index])

    def observe(self, estimate: float, hit: bool) -> None:
        """Record whether the target took a token with this estimate."""
        index = min(int(estimate * _BINS), _BINS - 1)
        self._hits[index] = self._hits[index] * _DECAY + hit
        self._trials[index] = self._trials[index] * _DECAY + 1.0
