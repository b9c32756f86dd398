"""How much of the answer that a client expects is in the answer, as OpenAI counts it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise


class PredictionMatch:
    """Follows a prediction along an answer. After a divergence, it goes on where two tokens of the answer occur."""

    __slots__ = ("_before", "_is_counted", "_next", "_places", "_prediction", "accepted")

    def __init__(self, prediction: Sequence[int]) -> None:
        self.accepted = 0
        """Number of tokens of the prediction that are in the answer so far, in their order."""
        self._prediction = tuple(prediction)
        self._places: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(pairwise(self._prediction)):
            self._places.setdefault(pair, []).append(place + 1)
        self._next = 0
        self._before: int | None = None
        self._is_counted = False
        """Whether the token before is among the accepted ones."""

    @property
    def rejected(self) -> int:
        """Number of tokens of the prediction that are not in the answer."""
        return len(self._prediction) - self.accepted

    def add(self, tokens: Sequence[int]) -> None:
        """Follow the next tokens of the answer."""
        for token in tokens:
            if self._next < len(self._prediction) and self._prediction[self._next] == token:
                self._go_to(self._next, 1)
            else:
                self._realign(token)
            self._before = token

    def _realign(self, token: int) -> None:
        """Go on where the token before and this one stand in the rest of the prediction, if they do."""
        places = () if self._before is None else self._places.get((self._before, token), ())
        found = bisect_left(places, self._next + (not self._is_counted))
        if found < len(places):
            self._go_to(places[found], 1 if self._is_counted else 2)
        else:
            self._is_counted = False

    def _go_to(self, place: int, count: int) -> None:
        self.accepted += count
        self._next = place + 1
        self._is_counted = True
