"""Where a JSON object in a text that arrives in parts ends."""

from __future__ import annotations


class JsonSpan:
    """Counts the brackets of a JSON text, outside of its strings. It does not check the text in other ways."""

    __slots__ = ("_escaped", "_in_string", "depth")

    def __init__(self) -> None:
        self.depth = 0
        """Number of open brackets."""
        self._in_string = False
        self._escaped = False

    def until(self, text: str, start: int, depth: int) -> int | None:
        """Read from `start`, and return the index after the bracket that closes down to `depth`.

        Returns `None` if the text ends before; the next call then continues with the text that follows.
        """
        for index in range(start, len(text)):
            char = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= depth:
                    return index + 1
        return None
