"""An index of the n-grams of a growing list of tokens, for prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence


class SuffixIndex:
    """For every n-gram of a list of tokens, the positions after its occurrences in ascending order.

    Adding or removing a token costs one step per n-gram length. The cost of a lookup grows with neither the list nor
    the path that follows it.
    The caller owns the list and reports its changes: `cut` before it removes tokens, `extend` after it added some.
    """

    __slots__ = ("_ends", "_sizes", "_tokens")

    def __init__(self, tokens: list[int], shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._sizes = range(shortest, longest + 1)
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def cut(self, length: int) -> None:
        """Remove the tokens from position `length` on from the index, before they are removed from the list."""
        for end in range(len(self._tokens), length, -1):
            for ngram in self.ending_at(end):
                ends = self._ends[ngram]
                ends.pop()  # positions are removed in reverse order of insertion, so this is `end`
                if not ends:
                    del self._ends[ngram]

    def extend(self, length: int) -> None:
        """Add the tokens from position `length` on to the index."""
        for end in range(length + 1, len(self._tokens) + 1):
            for ngram in self.ending_at(end):
                self._ends.setdefault(ngram, []).append(end)

    def ends(self, ngram: tuple[int, ...]) -> Sequence[int]:
        """Positions after the occurrences of `ngram`, including the end of the list if the list ends with `ngram`."""
        return self._ends.get(ngram, ())

    def ending_at(self, end: int) -> list[tuple[int, ...]]:
        """The n-grams that end before position `end`, shortest first."""
        return [tuple(self._tokens[end - size : end]) for size in self._sizes if size <= end]

    def ending_with(self, path: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-grams that the tokens followed by `path` end with, shortest first."""
        longest = self._sizes[-1]
        drafted = path[-longest:]
        tail = [*self._tokens[max(0, len(self._tokens) + len(drafted) - longest) :], *drafted]
        return [tuple(tail[-size:]) for size in self._sizes if size <= len(tail)]

    def next_after(self, path: Sequence[int]) -> tuple[int, int] | None:
        """Find the last earlier occurrence of the longest possible suffix of the tokens followed by `path`.

        Returns the token after that occurrence and the suffix's length, or `None` without an occurrence.
        """
        for ngram in reversed(self.ending_with(path)):
            for end in reversed(self.ends(ngram)):
                if end < len(self._tokens):
                    return self._tokens[end], len(ngram)
                if path:  # the occurrence ends with the list, so the path follows it
                    return path[0], len(ngram)
        return None
