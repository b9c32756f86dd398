"""What followed the last few tokens when they came before: looked up, not computed."""

from __future__ import annotations

from collections.abc import Sequence


class SuffixIndex:
    """For every n-gram of a list of tokens the positions after it, ascending.

    Adding or taking away a token costs one step per n-gram length; looking up costs nothing that grows with the
    context. The list belongs to somebody else, who says what changes: `cut` before tokens go, `extend` after they came.
    """

    __slots__ = ("_ends", "_sizes", "_tokens")

    def __init__(self, tokens: list[int], shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._sizes = range(shortest, longest + 1)
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def cut(self, length: int) -> None:
        """The tokens from `length` on are about to go."""
        for end in range(len(self._tokens), length, -1):
            for ngram in self.ending_at(end):
                ends = self._ends[ngram]
                ends.pop()  # what was indexed last goes first, so this is `end`
                if not ends:
                    del self._ends[ngram]

    def extend(self, length: int) -> None:
        """The tokens from `length` on are new."""
        for end in range(length + 1, len(self._tokens) + 1):
            for ngram in self.ending_at(end):
                self._ends.setdefault(ngram, []).append(end)

    def ends(self, ngram: tuple[int, ...]) -> Sequence[int]:
        """The positions after it; that of the last token too, if it ends there."""
        return self._ends.get(ngram, ())

    def ending_at(self, end: int) -> list[tuple[int, ...]]:
        """The n-grams before position `end`, shortest first."""
        return [tuple(self._tokens[end - size : end]) for size in self._sizes if size <= end]

    def next_after(self, path: Sequence[int]) -> tuple[int, int] | None:
        """What followed the longest suffix of the tokens and `path` when it came last, and that suffix's length."""
        longest = self._sizes[-1]
        tail = [*self._tokens[max(0, len(self._tokens) + len(path) - longest) :], *path][-longest:]
        length = len(self._tokens)
        for size in reversed(self._sizes):
            if size > len(tail):
                continue
            for end in reversed(self.ends(tuple(tail[-size:]))):
                if end < length:
                    return self._tokens[end], size
                if path:  # it ended with the last token: what follows is the path itself
                    return path[0], size
        return None
