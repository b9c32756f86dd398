"""Finds where the end of a text occurred before, in a growing list of tokens.

The index has one hash chain per n-gram length, as LZ77 compressors do: a table maps the hash of an n-gram to the
position after its last occurrence, and each position points to the one after the occurrence before. Three lengths
suffice, because a found occurrence is compared token by token to get the length of the whole match. In contrast to a
suffix automaton or suffix tree, tokens can be removed at both ends at the cost of adding them, memory is a few words
per token, and the latest occurrences come first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

SEPARATOR = -1
"""A token that no match contains. It separates texts in one index."""
_LENGTHS = 3
_NONE = -1


class OccurrenceIndex:
    """Positions after the occurrences of n-grams in `tokens`, the latest first.

    Adding or removing a token costs one step per n-gram length. A position counts all tokens that were ever added; the
    first `base` of them are evicted. Only the methods change `tokens`.
    """

    __slots__ = ("_heads", "_previous", "_sizes", "_unbroken", "base", "tokens")

    def __init__(self, tokens: list[int], shortest: int, longest: int) -> None:
        """Index the list, which is empty at first. Matches have `shortest` tokens or more."""
        self.tokens = tokens
        self.base = 0
        """Position of the first token."""
        self._sizes = tuple(shortest << step for step in range(_LENGTHS) if step == 0 or shortest << step <= longest)
        self._heads: tuple[dict[int, int], ...] = tuple({} for _ in self._sizes)
        self._previous = tuple(array("q") for _ in self._sizes)
        self._unbroken = 0
        """Number of tokens since the last separator."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.base + len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        own = self.tokens
        levels = list(zip(self._sizes, self._heads, self._previous, strict=True))
        for token in tokens:
            own.append(token)
            self._unbroken = 0 if token == SEPARATOR else self._unbroken + 1
            end = self.base + len(own)
            for size, heads, previous in levels:
                if self._unbroken < size:
                    previous.append(_NONE)
                else:
                    key = hash(tuple(own[-size:]))
                    previous.append(heads.get(key, _NONE))
                    heads[key] = end

    def cut(self, end: int) -> None:
        """Remove the tokens from position `end` on. The text has no separators."""
        own = self.tokens
        while self.end > max(end, self.base):
            for size, heads, previous in zip(self._sizes, self._heads, self._previous, strict=True):
                earlier = previous.pop()
                if self._unbroken >= size:
                    key = hash(tuple(own[-size:]))
                    if earlier > self.base:
                        heads[key] = earlier
                    else:
                        del heads[key]
            own.pop()
            self._unbroken -= 1

    def evict(self, count: int) -> None:
        """Remove the first `count` tokens, which end with a separator."""
        own = self.tokens
        for size, heads, previous in zip(self._sizes, self._heads, self._previous, strict=True):
            for index in range(size, count + 1):
                key = hash(tuple(own[index - size : index]))
                if heads.get(key) == self.base + index:
                    del heads[key]
            del previous[:count]
        del own[:count]
        self.base += count

    def find(self, context: Sequence[int], most: int) -> dict[int, int]:
        """Map the positions after earlier occurrences of the end of `context` to the lengths of the matches, in tokens.

        Longer n-grams are looked up first, and of each at most the `most` latest occurrences are examined. The position
        `end` is left out, because nothing follows there.
        """
        found: dict[int, int] = {}
        for size, heads, previous in zip(
            reversed(self._sizes), reversed(self._heads), reversed(self._previous), strict=True
        ):
            if len(found) >= most:
                break
            if size > len(context):
                continue
            position = heads.get(hash(tuple(context[-size:])), _NONE)
            for _ in range(most + 1):
                if position <= self.base:
                    break
                if position not in found and position != self.end:
                    length = self.match_length(position, context)
                    if length >= size:  # not only the hashes are equal
                        found[position] = length
                position = previous[position - self.base - 1]
        return found

    def following(self, position: int, count: int) -> list[int]:
        """At most `count` tokens from `position` to the next separator or the end."""
        tokens = self.tokens[position - self.base : position - self.base + count]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def match_length(self, position: int, context: Sequence[int]) -> int:
        """Number of tokens before `position` that equal the end of `context`."""
        tokens, last = self.tokens, position - self.base - 1
        most = min(len(context), last + 1)
        length = 0
        while length < most and tokens[last - length] == context[-1 - length]:
            length += 1
        return length
