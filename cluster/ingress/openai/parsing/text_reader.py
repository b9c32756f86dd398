"""Reads a text that arrives in parts.

Each method is a generator that yields where it needs more text, and decides only what no later text can change. So what
is read does not depend on how the text is split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""Yields where it waits for more text, and returns what it has read."""

_MOST_OPEN = 128
"""Most characters that `*` in a literal stands for."""
_SPACES = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,\]}]*")
_IN_JSON = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_STRING = re.compile(rf'"{_IN_STRING.pattern}"', re.DOTALL)
_ESCAPE_OR_CONTROL = re.compile(r"\\[^\x00-\x1f]|\\?[\x00-\x1f]")


def strict_json(text: str) -> str:
    """Return JSON with the control characters in its strings escaped, which models may leave as they are."""
    return _STRING.sub(lambda found: _escaped(found[0]), text)


def _escaped(text: str) -> str:
    """Return a part of a string with its control characters escaped. A backslash before one stands for itself."""
    return _ESCAPE_OR_CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    text = found[0]
    return json.dumps(text)[1:-1] if text[-1] < " " else text


class Markers:
    """Texts of which the first is searched in a text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(set(texts), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._longest = len(self._texts[0]) if self._texts else 0

    def find(self, text: str, start: int, *, is_final: bool) -> tuple[int, str | None]:
        """Return the place of the first marker and the longest one there.

        Returns the place from which on the text is undecided, and `None`, if there is none yet.
        """
        found = self._any.search(text, start)
        end = len(text) if found is None else found.start() + 1
        if not is_final:
            for place in range(max(start, len(text) - self._longest + 1), end):
                rest = text[place:]
                if any(len(rest) < len(marker) and marker.startswith(rest) for marker in self._texts):
                    return place, None
        return (len(text), None) if found is None else (found.start(), found[0])


class TextReader:
    """The text of an answer so far, and the place up to which it was read."""

    __slots__ = ("at", "is_final", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False
        """Whether no more text arrives."""

    def cut(self) -> None:
        """Forget what was read. Earlier places are no longer valid."""
        self.text, self.at = self.text[self.at :], 0

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Read all characters that a pattern allows, which repeats one set of characters, like `[a-z]*`."""
        start = self.at
        while True:
            found = characters.match(self.text, self.at)
            self.at = self.at if found is None else found.end()
            if self.at < len(self.text) or self.is_final:
                return self.text[start : self.at]
            yield

    def spaces(self) -> Reading[str]:
        """Read white space."""
        return self.run(_SPACES)

    def ahead(self) -> Reading[str]:
        """Return the character after white space, which is read; empty at the end of the answer."""
        yield from self.spaces()
        return (yield from self.character())

    def character(self) -> Reading[str]:
        """Return the next character without reading it; empty at the end of the answer."""
        while self.at >= len(self.text) and not self.is_final:
            yield
        return self.text[self.at : self.at + 1]

    def literal(self, text: str) -> Reading[bool]:
        """Read a text with white space of any amount before and in it. Read nothing if it is not there."""
        start = self.at
        for word in text.split():
            yield from self.spaces()
            if not (yield from self._word(word)):
                self.at = start
                return False
        return True

    def _word(self, word: str) -> Reading[bool]:
        fixed, star, end = word.partition("*")
        while (seen := self.text[self.at : self.at + len(fixed)]) != fixed:
            if self.is_final or not fixed.startswith(seen):
                return False
            yield
        self.at += len(fixed)
        if not star:
            return True
        most = self.at + _MOST_OPEN
        while (found := self.text.find(end, self.at, most)) < 0:
            if self.is_final or len(self.text) >= most:
                return False
            yield
        self.at = found + len(end)
        return True

    def until(self, markers: Markers, take: Callable[[str], None], held: str = "") -> Reading[str | None]:
        """Pass on the text before the first marker, and return the marker; `None` if the answer ends before it.

        The place is then before the marker. Characters of `held` in front of it are not passed on, and not read.
        """
        searched = self.at  # what was held and searched before is not searched again at every part
        while True:
            place, marker = markers.find(self.text, searched, is_final=self.is_final)
            end = place
            if held and not (self.is_final and marker is None):
                certain = self.text[searched:place].rstrip(held)
                end = searched + len(certain) if certain else self.at
            if end > self.at:
                take(self.text[self.at : end])
                self.at = end
            if marker is not None or self.is_final:
                return marker
            searched = place - self.at
            self.cut()
            yield

    def json_string(self) -> Reading[str | None]:
        """Read and return a JSON string as it is written; `None` if none begins here, or the answer ends in it."""
        if (yield from self.ahead()) != '"':
            return None
        start = self.at
        self.at += 1
        while True:
            found = _IN_STRING.match(self.text, self.at)
            self.at = self.at if found is None else found.end()
            if self.text[self.at : self.at + 1] == '"':
                self.at += 1
                return self.text[start : self.at]
            if self.is_final:
                return None
            yield

    def json_value(self) -> Reading[str | None]:
        """Read and return any JSON value as it is written; `None` if the answer ends in it."""
        first = yield from self.ahead()
        if first == '"':
            return (yield from self.json_string())
        start = self.at
        if first not in ("{", "["):
            return (yield from self.run(_SCALAR)) or None
        is_whole = yield from self.json_rest(0)
        return self.text[start : self.at] if is_whole else None

    def json_rest(self, depth: int, take: Callable[[str], None] | None = None) -> Reading[bool]:
        """Read up to the bracket that closes as many brackets as are open, `depth` of them before this place.

        Passes on what is read to `take` while it arrives, with the control characters in its strings escaped, as JSON
        demands. Returns whether the answer has that bracket.
        """
        is_text, read = False, list[str]()
        while True:
            while self.at < len(self.text):
                found = (_IN_STRING if is_text else _IN_JSON).match(self.text, self.at)
                part = "" if found is None else found[0]
                self.at += len(part)
                if take is not None:
                    read.append(_escaped(part) if is_text else part)
                character = self.text[self.at : self.at + 1]
                if not character or character == "\\":
                    break  # the end of the text, perhaps within an escape
                self.at += 1
                if take is not None:
                    read.append(character)
                if character == '"':
                    is_text = not is_text
                else:
                    depth += 1 if character in "{[" else -1
                if depth == 0:
                    break
            is_whole = depth == 0
            if take is not None:
                if self.is_final and not is_whole:
                    read.append(self.text[self.at :])
                    self.at = len(self.text)
                if text := "".join(read):
                    take(text)
                read.clear()
                self.cut()
            if is_whole or self.is_final:
                return is_whole
            yield

    def value(self, quotes: Sequence[str], ends: str, *, has_escapes: bool) -> Reading[str | None]:
        """Read and return a value of another notation, up to one of `ends` outside of quotes and brackets.

        `has_escapes`: a backslash escapes the next character in quotes. Returns `None` if the answer ends before.
        """
        start, depth, open_quote = self.at, 0, ""
        while True:
            while self.at < len(self.text):
                character = self.text[self.at]
                if has_escapes and open_quote and character == "\\":
                    if self.at + 1 >= len(self.text):
                        break
                    self.at += 2
                    continue
                expected = (open_quote,) if open_quote else quotes
                rest = self.text[self.at : self.at + max(map(len, expected), default=0)]
                if not self.is_final and any(len(rest) < len(one) and one.startswith(rest) for one in expected):
                    break
                quote = next((one for one in expected if rest.startswith(one)), None)
                if quote is not None:
                    open_quote = "" if open_quote else quote
                    self.at += len(quote)
                    continue
                if not open_quote:
                    if depth == 0 and character in ends:
                        return self.text[start : self.at]
                    depth += (character in "([{") - (character in ")]}")
                self.at += 1
            if self.is_final:
                self.at = len(self.text)
                return None
            yield
