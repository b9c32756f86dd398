"""What followed the last tokens of one request, for contexts of one token and of several.

A longer context says more about what follows and is known less often, so its successors precede those of shorter ones
(back-off, Katz 1987; contexts of several tokens for drafts: Stewart et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

Context = tuple[int, ...]
"""The last tokens before a position, in the order of the text."""


class ContextSuccessors:
    """At most `count` successors of every context of 1 to `longest` tokens, the most probable first."""

    __slots__ = ("_count", "_rows", "longest")

    def __init__(self, longest: int, count: int) -> None:
        self.longest = longest
        self._count = count
        self._rows: dict[Context, tuple[int, ...]] = {}

    def before(self, tokens: Sequence[int], position: int) -> Context:
        """The longest context of a position of a text."""
        return tuple(tokens[max(0, position - self.longest) : position])

    def add(self, context: Context, successor: int) -> None:
        """Add one successor of the context and its ends before all others, where it is not known."""
        rows = self._rows
        while context:
            known = rows.get(context)
            if known is None:
                rows[context] = (successor,)
            elif successor not in known:
                rows[context] = (successor, *known)[: self._count]
            context = context[1:]

    def replace(self, context: Context, successors: Sequence[int]) -> None:
        """Replace the successors of the context and its ends. Those beyond the width are left out."""
        row = tuple(successors[: self._count])
        while context:
            self._rows[context] = row
            context = context[1:]

    def after(self, context: Context, others: Sequence[int] = ()) -> tuple[int, list[int]]:
        """The length of the longest known end of the context, and at most `count` successors: of that end first.

        Those of shorter ends and then `others` follow. The length is 0 if no end is known.
        """
        rows, found, length = self._rows, list[int](), 0
        while context:
            if (row := rows.get(context)) is not None:
                length = length or len(context)
                found += row if not found else [one for one in row if one not in found]
                if len(found) >= self._count:
                    return length, found[: self._count]
            context = context[1:]
        found += [one for one in others if one not in found]
        return length, found[: self._count]
