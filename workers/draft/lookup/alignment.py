"""Where an answer is in the text that was predicted for it, and what may follow there."""

from __future__ import annotations

from collections.abc import Sequence

from workers.draft.lookup.continuation_tree import Continuation
from workers.draft.lookup.occurrence_index import OccurrenceIndex

START_MATCH = 3
"""The first token of the answer counts as if it followed a match of this length."""
_OCCURRENCES = 64
"""Most occurrences of one n-gram in the prediction that are examined, besides the places near the expected one."""
_LONGEST_REPLACEMENT = 4
"""Most tokens on either side of a replacement that is expected to happen again."""
_LEAST_UNLIKE = 2
"""However long the difference is, its tokens may only have been inserted: the match there is never further below 0."""
_NEIGHBOURS = 2
"""Right after a difference, this many places on each side of the expected one are candidates."""


class Alignment:
    """The place in a prediction that the end of an answer has reached.

    Tokens that are equal, and replacements that happened before, move the place on. After any other difference, equal
    tokens near the expected place or a longer match elsewhere align the answer again. What was replaced in between is
    expected to be replaced by the same tokens at its next occurrences, until one of these stays as it was predicted.
    """

    __slots__ = ("_cursor", "_index", "_read", "_replacements", "_run", "_window", "prediction")

    def __init__(self, prediction: Sequence[int], shortest: int, longest: int, window: int) -> None:
        """A distant place needs `shortest` equal tokens; within `window` tokens of the expected place, one aligns."""
        self.prediction = tuple(prediction)
        self._index = OccurrenceIndex([], shortest, longest)
        self._index.extend(prediction)
        self._window = window
        self._replacements: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """By the first replaced token: the replaced tokens, and those that the answer had instead."""
        self._restart()

    def _restart(self) -> None:
        self._cursor = 0
        """The place: the position in the prediction that follows `_read` tokens of the answer."""
        self._read = 0
        """Tokens of the answer up to the place."""
        self._run = START_MATCH
        """Tokens before the place that were as expected."""

    def continuations(self, answer: Sequence[int], longest: int, most: int, length: int) -> list[Continuation]:
        """What may follow the answer, the most probable first: at most `most` places, with up to `length` tokens each.

        `longest` tokens are compared at most. Right after a difference there are more places, without a match.
        """
        if len(answer) < self._read:
            self._restart()
        self._follow(answer)
        if not answer:
            return self._drafts(0, START_MATCH, length)
        expected = self._cursor + len(answer) - self._read
        found = self._matches(answer[max(0, len(answer) - longest) :], expected)
        if self._read == len(answer):
            found[self._cursor] = max(self._run, found.get(self._cursor, 0))
        if not found:
            return self._after_difference(answer, expected, length)
        ranked = sorted(found.items(), key=lambda item: (item[1], -abs(item[0] - expected)), reverse=True)
        self._align(answer, *ranked[0])
        drafts = [self._drafts(position, match, length) for position, match in ranked[:most]]
        return [one for several in drafts for one in several]

    def _follow(self, answer: Sequence[int]) -> None:
        """Move the place on over equal tokens and known replacements."""
        prediction = self.prediction
        while self._read < len(answer) and self._cursor < len(prediction):
            token = prediction[self._cursor]
            known = self._replacements.get(token)
            if answer[self._read] == token:
                if known is not None and self._is_at(known[0], self._cursor):
                    del self._replacements[token]
                consumed = written = 1
            elif known is not None and self._is_written(known, answer):
                consumed, written = len(known[0]), len(known[1])
            else:
                return
            self._cursor += consumed
            self._read += written
            self._run += written

    def _is_at(self, tokens: tuple[int, ...], position: int) -> bool:
        return self.prediction[position : position + len(tokens)] == tokens

    def _is_written(self, known: tuple[tuple[int, ...], tuple[int, ...]], answer: Sequence[int]) -> bool:
        """Whether the answer has the whole replacement at the place."""
        old, new = known
        return self._is_at(old, self._cursor) and tuple(answer[self._read : self._read + len(new)]) == new

    def _align(self, answer: Sequence[int], position: int, match: int) -> None:
        """Set the place, and keep what was replaced since the last one."""
        if position == self._cursor and self._read == len(answer):
            return
        most = _LONGEST_REPLACEMENT + 1  # one more shows that it is too long
        replaced, written = position - match - self._cursor, len(answer) - match - self._read
        old = self.prediction[self._cursor : self._cursor + max(0, min(replaced, most))]
        new = tuple(answer[self._read : self._read + max(0, min(written, most))])
        if 0 < len(old) <= _LONGEST_REPLACEMENT and 0 < len(new) <= _LONGEST_REPLACEMENT:
            self._replacements[old[0]] = old, new
        self._cursor, self._read, self._run = position, len(answer), match

    def _matches(self, context: Sequence[int], expected: int) -> dict[int, int]:
        """Places in the prediction after tokens with which `context` ends, with the number of these tokens."""
        found = self._index.find(context, _OCCURRENCES)
        for position in range(max(1, expected - self._window), min(expected + self._window, self._index.end) + 1):
            if self.prediction[position - 1] == context[-1] and position not in found:
                found[position] = self._index.match_length(position, context)
        return found

    def _after_difference(self, answer: Sequence[int], expected: int, length: int) -> list[Continuation]:
        """What may follow a token that the prediction does not have here.

        As many tokens were replaced as were added, or tokens were only inserted, or a few more or fewer were replaced.
        """
        found: list[Continuation] = []
        gap = tuple(answer[self._read : self._read + _LONGEST_REPLACEMENT + 1])
        known = self._replacements.get(self.prediction[self._cursor]) if self._cursor < len(self.prediction) else None
        if known is not None and self._is_at(known[0], self._cursor) and known[1][: len(gap)] == gap:
            rest = (*known[1][len(gap) :], *self._replaced(self._cursor + len(known[0]), length))
            found.append(Continuation(rest[:length], self._run))
        unlike = len(answer) - self._read - 1  # the longer the difference already is, the less probable is its end
        places = {expected: -unlike}
        places.setdefault(self._cursor, -min(unlike, _LEAST_UNLIKE))
        for distance in range(1, _NEIGHBOURS + 1):
            for position in (expected + distance, expected - distance):
                if position >= self._cursor:
                    places.setdefault(position, -distance - unlike)
        return [*found, *(one for position, match in places.items() for one in self._drafts(position, match, length))]

    def _drafts(self, position: int, match: int, length: int) -> list[Continuation]:
        """What follows in the prediction with known replacements, and as it is."""
        plain = self.prediction[position : position + length]
        replaced = self._replaced(position, length)
        if replaced == plain:
            return [Continuation(plain, match)]
        return [Continuation(replaced, match), Continuation(plain, match - 1)]

    def _replaced(self, position: int, length: int) -> tuple[int, ...]:
        """The prediction from `position` on, with the replacements."""
        found: list[int] = []
        while len(found) < length and position < len(self.prediction):
            known = self._replacements.get(self.prediction[position])
            if known is not None and self._is_at(known[0], position):
                found += known[1]
                position += len(known[0])
            else:
                found.append(self.prediction[position])
                position += 1
        return tuple(found[:length])
