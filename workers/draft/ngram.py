"""Prompt lookup: what followed the last few tokens when they came before is likely to follow again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from cluster.core.config import DraftSection, TargetSection
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from cluster.core.types import DraftBudget, DraftRow, Proposal, RowFault, SequenceStart
from workers.draft.method import register
from workers.draft.sessions import Session, Sessions

LOOKS_PER_CANDIDATE = 8
"""Earlier occurrences of one suffix that are looked at for each candidate wanted: most are alike."""


class IndexedSession(Session):
    """Committed tokens, and for every n-gram in them the positions after it, ascending.

    Adding or taking away a token costs one step per n-gram length; looking up costs nothing that grows
    with the context.
    """

    __slots__ = ("_ends", "_sizes")

    def __init__(self, start: SequenceStart, shortest: int, longest: int) -> None:
        super().__init__(start)
        self._sizes = range(shortest, longest + 1)
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """See `Session`."""
        for end in range(len(self.tokens), known_len, -1):
            for ngram in self._ngrams_ending_at(end):
                ends = self._ends[ngram]
                ends.pop()  # what was indexed last goes first, so this is `end`
                if not ends:
                    del self._ends[ngram]
        super().replace(known_len, new_tokens)
        for end in range(known_len + 1, len(self.tokens) + 1):
            for ngram in self._ngrams_ending_at(end):
                self._ends.setdefault(ngram, []).append(end)

    def continuations(self, count: int, length: int) -> tuple[tuple[int, ...], ...]:
        """At most `count` distinct continuations of `length` tokens, likeliest first.

        Likelier is what followed a longer match, and among equal matches the later one.
        """
        found: dict[tuple[int, ...], None] = {}
        for ngram in reversed(self._ngrams_ending_at(len(self.tokens))):
            earlier = islice(reversed(self._ends[ngram]), 1, 1 + LOOKS_PER_CANDIDATE * count)
            for end in earlier:
                found.setdefault(self._continued(end, length))
                if len(found) == count:
                    return tuple(found)
        return tuple(found)

    def _continued(self, position: int, length: int) -> tuple[int, ...]:
        """The tokens from `position` on; at the end of the context the repetition goes on."""
        period = len(self.tokens) - position
        return tuple(self.tokens[position + step % period] for step in range(length))

    def _ngrams_ending_at(self, end: int) -> list[tuple[int, ...]]:
        """Shortest first."""
        return [tuple(self.tokens[end - size : end]) for size in self._sizes if size <= end]


class NgramDrafter:
    """Looks every row's last tokens up in that row's own context."""

    def __init__(self, section: DraftSection) -> None:
        self._section = section
        self._sessions = Sessions(lambda start: IndexedSession(start, section.ngram_min, section.ngram_max))

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """See `DraftMethod`."""
        return tuple(self._propose(row) for row in rows)

    def grow(self) -> bool:
        """Nothing grows: guesses are made when asked for."""
        return False

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `DraftMethod`."""
        self._sessions.release(sequence_ids)

    def close(self) -> None:
        """See `DraftMethod`."""
        self._sessions.clear()

    def _propose(self, row: DraftRow) -> Proposal:
        session = self._sessions.apply(row)
        if isinstance(session, RowFault):
            return Proposal(row.sequence_id, row.base_len, fault=session)
        return Proposal(row.sequence_id, row.base_len, self._look_up(session, row.budget))

    def _look_up(self, session: IndexedSession, budget: DraftBudget) -> TokenTree:
        max_nodes = min(budget.max_nodes, self._section.max_nodes)
        max_depth = min(budget.max_depth, self._section.max_depth, max_nodes)
        if max_depth == 0:
            return TokenTree()
        candidates = session.continuations(self._section.ngram_candidates, max_depth)
        return TokenTree.from_candidates(candidates, max_nodes)


@register("ngram")
def create_ngram(section: DraftSection, target_section: TargetSection) -> NgramDrafter:  # noqa: ARG001
    """The method `ngram`, with the section's `ngram_*` settings."""
    return NgramDrafter(section)
