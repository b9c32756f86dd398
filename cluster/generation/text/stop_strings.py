"""Stop strings, which may span tokens and commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matched:
    """Text that may be sent, and the stop string that follows it, if one was found."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in a text that arrives in parts.

    A suffix that may still become a stop string is held back. The stop string that is complete first ends the text; of
    several that are complete at the same character, the longest. The result does not depend on how the text is split.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> Matched:
        """Add a part of the text, and return the text that may be sent. Do not call it again after a match.

        Without `may_end`, a stop string that this part completes is not a match; it is text like any other.
        """
        if not self._stops:
            return Matched(text)
        held = self._held + text
        found = self._first(held, len(self._held)) if may_end else None
        if found is not None:
            start, stop = found
            self._held = ""
            return Matched(held[:start], stop)
        certain = len(held) - self._undecided(held)
        self._held = held[certain:]
        return Matched(held[:certain])

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """Return start and string of the first stop string that ends after the first `seen` characters."""
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
