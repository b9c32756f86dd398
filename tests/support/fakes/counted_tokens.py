"""Lists of tokens that count what is read of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class CountedTokens(list[int]):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()
