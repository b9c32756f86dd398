"""The latest outputs of finished requests, which later requests with the same salt draft from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from workers.draft.lookup.occurrence_index import SEPARATOR, OccurrenceIndex


class OutputStore:
    """At most `most_tokens` tokens of outputs, over all salts; the oldest outputs are evicted first.

    Requests with different salts share nothing, so that no tenant gets drafts from another tenant's text.
    """

    def __init__(self, most_tokens: int, shortest: int, longest: int) -> None:
        self._most_tokens = most_tokens
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[str, OccurrenceIndex] = {}
        self._outputs: deque[tuple[str, int]] = deque()
        """Salt and number of tokens of each output, the oldest first; the separator counts."""
        self._token_count = 0

    def __len__(self) -> int:
        """Number of stored tokens, separators included."""
        return self._token_count

    @property
    def salts(self) -> frozenset[str]:
        """Salts with stored outputs."""
        return frozenset(self._indexes)

    def index(self, salt: str) -> OccurrenceIndex | None:
        """The outputs of one salt, with a separator after each; `None` if there are none."""
        return self._indexes.get(salt)

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Add an output, or its end if it is longer than the whole store."""
        tokens = tokens[max(0, len(tokens) + 1 - self._most_tokens) :]
        if len(tokens) <= self._shortest:
            return  # nothing could follow a match
        while self._token_count + len(tokens) + 1 > self._most_tokens:
            self._evict_oldest()
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = OccurrenceIndex([], self._shortest, self._longest)
        index.extend([*tokens, SEPARATOR])
        self._outputs.append((salt, len(tokens) + 1))
        self._token_count += len(tokens) + 1

    def _evict_oldest(self) -> None:
        salt, count = self._outputs.popleft()
        self._token_count -= count
        index = self._indexes[salt]
        index.evict(count)
        if not index.tokens:
            del self._indexes[salt]
