"""The pool of n-grams that lookahead decoding drafts from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MOST_FIRST_TOKENS = 4096
"""Most first tokens with n-grams in one pool; the one without a new n-gram for the longest time is evicted."""


class NgramPool:
    """What followed a token, at most `most` continuations of each token: the latest ones."""

    __slots__ = ("_found", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the latest one of its first token."""
        first, continuation = ngram[0], tuple(ngram[1:])
        found = self._found.setdefault(first, OrderedDict())
        found[continuation] = None
        found.move_to_end(continuation)
        if len(found) > self._most:
            found.popitem(last=False)
        self._found.move_to_end(first)
        if len(self._found) > _MOST_FIRST_TOKENS:
            self._found.popitem(last=False)

    def after(self, token: int) -> tuple[tuple[int, ...], ...]:
        """The continuations of `token`, the latest first."""
        return tuple(reversed(self._found.get(token, ())))
