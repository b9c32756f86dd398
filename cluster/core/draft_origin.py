"""Where drafted tokens come from, and how many accepted ones come from where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class DraftOrigin(IntEnum):
    """Where a drafted token comes from. The numbers are those on the wire.

    A token that several sources draft has the first of them in the order of the numbers: what the request itself
    shows needs no store and no model. A token that the grammar forces is `FORCED`, whoever else drafts it.
    """

    REQUEST = 1
    """The request itself: its prompt, its source, its prediction, its answer so far."""
    EARLIER = 2
    """Answers to earlier requests, in a store that outlives a request."""
    TRAINED = 3
    """A trained draft: a draft model, a module, or layers of the target."""
    FORCED = 4
    """The grammar of the request, which allows no other token."""


@dataclass(frozen=True, slots=True)
class OriginCounts:
    """Number of accepted draft tokens by origin."""

    request: int = 0
    earlier: int = 0
    trained: int = 0
    forced: int = 0

    def plus(self, origins: Iterable[DraftOrigin]) -> OriginCounts:
        """Return the counts with further tokens."""
        counts = [self.request, self.earlier, self.trained, self.forced]
        for origin in origins:
            counts[origin - 1] += 1
        return OriginCounts(*counts)


NO_ORIGINS = OriginCounts()
