"""The window of lookahead decoding (Fu et al. 2024): provisional tokens at the next positions, replaced in each step.

Jacobi iteration replaces every provisional token by the target's decision after the provisional tokens before it. The
window keeps the last few iterations. A column of it and one more decision are an n-gram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cluster.core.drafting import Evidence
from cluster.core.tree import ROOT


class JacobiWindow:
    """Columns of several tokens, one column per position.

    As a tree, the first tokens of the columns are the trunk, and the rest of a column is a chain below its trunk node.
    """

    __slots__ = ("_columns", "_first")

    def __init__(self) -> None:
        self._columns: dict[int, tuple[int, ...]] = {}
        """Position of a column's first token → its tokens."""
        self._first: int | None = None
        """Position of the first column while the target has not decided after the columns; `None` then."""

    def place(
        self,
        first: int,
        width: int,
        new_column: Callable[[int, int | None], tuple[int, ...]],
        fitted: Callable[[int, tuple[int, ...]], tuple[int, ...]] = lambda _, column: column,
    ) -> int:
        """Move the window to `width` columns from position `first`. Returns how many there are.

        `new_column` returns a new column's first tokens, from its position and the trunk's token before it, if any.
        `fitted` returns the tokens of a column as they may be at its position; with none, the window ends before it.
        """
        held = self._columns
        before: int | None = None
        self._columns = {}
        for position in range(first, first + width):
            column = fitted(position, held.get(position) or new_column(position, before))
            if not column:
                held = {}  # later columns would follow a gap
                break
            self._columns[position] = column
            before = column[0]
        placed = len(self._columns)
        self._columns |= {position: held[position] for position in sorted(held) if position >= first + width}
        self._first = first
        return placed

    def clear(self) -> None:
        """Drop all columns."""
        self._columns.clear()
        self._first = None

    def paths(self, width: int) -> list[tuple[int, ...]]:
        """The tokens from the first position along the trunk to the end of each of the first `width` columns."""
        return [(*trunk, *column) for _, trunk, column in self._walk(width)]

    def observe(self, evidence: Evidence) -> list[tuple[int, ...]]:
        """Advance the columns that the target's step decided after. Returns the n-grams that the decisions complete.

        Such a column gets the decision and drops its first token, so that it begins one position later. Evidence of a
        step after other tokens is ignored, and so are columns that were not in the step's tree.
        """
        if evidence.base_len != self._first or not evidence.decisions:
            return []
        tree = evidence.tree
        children = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        found: list[tuple[int, ...]] = []
        kept: dict[int, tuple[int, ...]] = {}
        for position, trunk, column in self._walk(len(self._columns)):
            node: int | None = ROOT
            for token in (*trunk, *column):
                node = None if node is None else children.get((node, token))
            if node is None or evidence.decisions[node + 1] < 0:
                kept.setdefault(position, column)
            else:
                ngram = (*column, evidence.decisions[node + 1])
                found.append(ngram)
                kept[position + 1] = ngram[1:]
        self._columns, self._first = kept, None
        return found

    def _walk(self, width: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Position, trunk before it, and tokens of each of the first `width` columns."""
        trunk: tuple[int, ...] = ()
        for position, column in list(self._columns.items())[:width]:
            yield position, trunk, column
            trunk = (*trunk, column[0])
