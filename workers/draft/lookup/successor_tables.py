"""Tables of successors (Token Recycling, Luo et al. 2024): what the target last ranked highest after each token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_UNKNOWN = -1
_GROWTH = 1024
"""Rows that a table grows by at least."""
_MOST_TOKENS = 1 << 20
"""Tokens from this number on have no row."""
_FIRST_RATE, _RATE_RATIO = 0.45, 0.4
"""Assumed probability that the first successor comes next, and the ratio of each rank's to the one before."""
_RATE_STEP = 0.01
"""Weight of the newest observation in a rank's rate."""

Rows = NDArray[np.int32]
"""[tokens, k] successors of each token, the most probable first; -1 where fewer are known."""


class Successors:
    """The table of one salt: at most `count` successors of each token."""

    def __init__(self, count: int, initial: Rows | None = None) -> None:
        """`initial` [tokens, count] is copied."""
        self._count = count
        self._rows: Rows = np.full((0, count), _UNKNOWN, dtype=np.int32) if initial is None else initial.copy()

    def after(self, token: int) -> list[int]:
        """The successors of a token, the most probable first."""
        if token >= len(self._rows):
            return []
        row: list[int] = self._rows[token].tolist()
        return row if row[-1] != _UNKNOWN else [one for one in row if one != _UNKNOWN]

    def add(self, token: int, successor: int) -> None:
        """Add one successor before all others, unless it is known."""
        known = self.after(token)
        if successor not in known:
            self.replace(token, [successor, *known])

    def replace(self, token: int, successors: Sequence[int]) -> None:
        """Replace the successors of a token. Those beyond the table's width are left out."""
        if token >= _MOST_TOKENS:
            return
        if token >= len(self._rows):
            missing = max(token + 1 - len(self._rows), len(self._rows), _GROWTH)
            grown = np.full((missing, self._count), _UNKNOWN, dtype=np.int32)
            self._rows = np.concatenate([self._rows, grown])
        kept = successors[: self._count]
        self._rows[token, : len(kept)] = kept
        self._rows[token, len(kept) :] = _UNKNOWN


class SuccessorTables:
    """A table for each salt; beyond `most`, the least recently used one is evicted.

    Requests with different salts share nothing, so that no tenant gets drafts from another tenant's text.
    """

    def __init__(self, count: int, most: int, initial: Rows | None = None) -> None:
        """`initial` [tokens, k] is what every table begins with."""
        if initial is not None:
            width = count - initial.shape[1]
            initial = np.pad(initial[:, :count], ((0, 0), (0, max(0, width))), constant_values=_UNKNOWN)
        self._count = count
        self._most = most
        self._initial = initial
        self._tables: OrderedDict[str, Successors] = OrderedDict()

    @property
    def salts(self) -> tuple[str, ...]:
        """Salts with a table, the least recently used first."""
        return tuple(self._tables)

    def of(self, salt: str) -> Successors:
        """The table of a salt."""
        table = self._tables.get(salt)
        if table is None:
            while len(self._tables) >= self._most:
                self._tables.popitem(last=False)
            table = self._tables[salt] = Successors(self._count, self._initial)
        self._tables.move_to_end(salt)
        return table


class RankRates:
    """The rate at which the successor of each rank comes next."""

    def __init__(self, count: int) -> None:
        self._rates = [_FIRST_RATE * _RATE_RATIO**rank for rank in range(count)]

    def __getitem__(self, rank: int) -> float:
        return self._rates[rank]

    def observe(self, successors: Sequence[int], token: int) -> None:
        """Record that `token` came next where `successors` were known."""
        for rank, successor in enumerate(successors):
            self._rates[rank] += _RATE_STEP * ((successor == token) - self._rates[rank])
