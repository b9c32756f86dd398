"""What came next after tokens and contexts, for Token Recycling (Luo et al. 2024).

A table of a salt has what the target last ranked highest after each token. A request also has what followed contexts of
several tokens. A longer context says more about what follows and is known less often, so its successors precede those
of shorter ones (back-off, Katz 1987; contexts of several tokens for drafts: Stewart et al. 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_UNKNOWN = -1
_GROWTH = 1024
"""Rows that a table grows by at least."""
_MOST_TOKENS = 1 << 20
"""Tokens from this number on have no row."""
_FIRST_RATES = (0.35, 0.35, 0.5, 0.7)
"""Assumed probability that the first successor comes next, by the length of the known context; the last one holds for
longer ones."""
_SECOND_SHARE, _RATE_RATIO = 0.35, 0.4
"""Assumed share of the second successor in what the first leaves, and the ratio of each rank to the one before."""
_RATE_STEP = 0.01
"""Weight of the newest observation in a rank's rate."""

Rows = NDArray[np.int32]
"""[tokens, k] successors of each token, the most probable first; -1 where fewer are known."""
Context = tuple[int, ...]
"""The last tokens before a position, in the order of the text."""


class Successors:
    """The table of one salt: at most `count` successors of each token.

    Rows that are given stay as they are: they are means over many texts, which predict better than the last text.
    """

    def __init__(self, count: int, given: Rows | None = None) -> None:
        """`given` [tokens, count] is not copied; a row of -1 alone is learned."""
        self._count = count
        self._rows: Rows = np.full((0, count), _UNKNOWN, dtype=np.int32)
        self._given = self._rows if given is None else given

    def after(self, token: int) -> list[int]:
        """The successors of a token, the most probable first."""
        rows = self._given if self.is_given(token) else self._rows
        if token >= len(rows):
            return []
        row: list[int] = rows[token].tolist()
        return row if row[-1] != _UNKNOWN else [one for one in row if one != _UNKNOWN]

    def add(self, token: int, successor: int) -> None:
        """Add one successor before all others, unless it is known or the token's row is given."""
        if self.is_given(token):
            return
        known = self.after(token)
        if successor not in known:
            self.replace(token, [successor, *known])

    def replace(self, token: int, successors: Sequence[int]) -> None:
        """Replace the successors of a token whose row is not given. Those beyond the table's width are left out."""
        if token >= _MOST_TOKENS or self.is_given(token):
            return
        if token >= len(self._rows):
            missing = max(token + 1 - len(self._rows), len(self._rows), _GROWTH)
            grown = np.full((missing, self._count), _UNKNOWN, dtype=np.int32)
            self._rows = np.concatenate([self._rows, grown])
        kept = successors[: self._count]
        self._rows[token, : len(kept)] = kept
        self._rows[token, len(kept) :] = _UNKNOWN

    def is_given(self, token: int) -> bool:
        """Whether the successors of a token were given."""
        return token < len(self._given) and bool(self._given[token, 0] != _UNKNOWN)


class SuccessorTables:
    """A table for each salt; beyond `most`, the least recently used one is evicted.

    Requests with different salts share nothing, so that no tenant gets drafts from another tenant's text.
    """

    def __init__(self, count: int, most: int, given: Rows | None = None) -> None:
        """`given` [tokens, k] are rows that all tables have."""
        if given is not None:
            width = count - given.shape[1]
            given = np.pad(given[:, :count], ((0, 0), (0, max(0, width))), constant_values=_UNKNOWN)
        self._count = count
        self._most = most
        self._given = given
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
            table = self._tables[salt] = Successors(self._count, self._given)
        self._tables.move_to_end(salt)
        return table


class RankRates:
    """The rate at which the successor of each rank comes next."""

    def __init__(self, count: int, context: int = 0) -> None:
        """`context` is the length of the contexts that the successors follow; 0 is a table's single token."""
        first = _FIRST_RATES[min(context, len(_FIRST_RATES) - 1)]
        second = (1.0 - first) * _SECOND_SHARE
        self._rates = [first, *(second * _RATE_RATIO**rank for rank in range(count - 1))]

    def __getitem__(self, rank: int) -> float:
        return self._rates[rank]

    def observe(self, successors: Sequence[int], token: int) -> None:
        """Record that `token` came next where `successors` were known."""
        for rank, successor in enumerate(successors):
            self._rates[rank] += _RATE_STEP * ((successor == token) - self._rates[rank])


class FoundSuccessors(NamedTuple):
    """What is known to follow a context."""

    length: int
    """Length of the longest known end of the context; 0 if no end is known."""
    successors: list[int]
    """The successors, the most probable first."""
    own: int
    """Number of the leading successors that the request itself has shown. A table has the others."""


class ContextSuccessors:
    """At most `count` successors of every context of 1 to `longest` tokens, the most probable first."""

    __slots__ = ("_count", "_rows", "longest")

    def __init__(self, longest: int, count: int) -> None:
        self.longest = longest
        self._count = count
        self._rows: dict[Context, tuple[int, ...]] = {}

    def before(self, tokens: Sequence[int], position: int) -> Context:
        """The longest context of a position of a text."""
        return tuple(tokens[max(0, position - self.longest) : position])

    def add(self, context: Context, successor: int) -> None:
        """Add one successor of the context and its ends before all others, where it is not known."""
        rows = self._rows
        while context:
            known = rows.get(context)
            if known is None:
                rows[context] = (successor,)
            elif successor not in known:
                rows[context] = (successor, *known)[: self._count]
            context = context[1:]

    def replace(self, context: Context, successors: Sequence[int]) -> None:
        """Replace the successors of the context and its ends. Those beyond the width are left out."""
        row = tuple(successors[: self._count])
        while context:
            self._rows[context] = row
            context = context[1:]

    def after(self, context: Context, others: Sequence[int] = ()) -> FoundSuccessors:
        """At most `count` successors of a context: of its longest known end first.

        Those of shorter ends and then `others` follow.
        """
        rows, found, length = self._rows, list[int](), 0
        while context:
            if (row := rows.get(context)) is not None:
                length = length or len(context)
                found += row if not found else [one for one in row if one not in found]
                if len(found) >= self._count:
                    return FoundSuccessors(length, found[: self._count], self._count)
            context = context[1:]
        own = len(found)
        found += [one for one in others if one not in found]
        return FoundSuccessors(length, found[: self._count], own)
