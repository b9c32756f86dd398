"""Prompt lookup: drafts the tokens that followed the last few tokens earlier in the sequence, or in its source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from cluster.core.config.base import PluginSettings
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.request import SequenceStart
from cluster.core.tree import TokenTree
from workers.draft.common.sessions import Session
from workers.draft.common.suffix_index import SuffixIndex
from workers.draft.lookup.sequence_drafter import SequenceDrafter
from workers.draft.registry import ON_TARGET_FIRST, register

LOOKS_PER_CANDIDATE = 8
"""Earlier occurrences of one suffix that are examined per requested candidate; most of them are alike."""


class NgramSettings(PluginSettings):
    """Settings of prompt lookup."""

    renamed: ClassVar[dict[str, str]] = {"ngram_max": "max", "ngram_min": "min", "ngram_candidates": "candidates"}

    max: Annotated[int, Field(ge=1, le=16)] = 8
    """Longest suffix that is looked up, in tokens."""
    min: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix that is looked up, in tokens."""
    candidates: Annotated[int, Field(ge=1, le=16)] = 2
    """Most earlier occurrences that are merged into one tree."""

    @model_validator(mode="after")
    def _check(self) -> NgramSettings:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must be at most max ({self.max})")
        return self


class IndexedSession(Session):
    """Committed tokens and the source of an encoder-decoder model, with indices of the n-grams in them."""

    __slots__ = ("_index", "_source", "_source_index")

    def __init__(self, start: SequenceStart, shortest: int, longest: int) -> None:
        super().__init__(start)
        self._index = SuffixIndex(self.tokens, shortest, longest)
        self._source = list(start.source)
        self._source_index = SuffixIndex(self._source, shortest, longest)
        self._source_index.extend(0)

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """Replace all tokens after the first `known_len` by `new_tokens`."""
        self._index.cut(known_len)
        super().replace(known_len, new_tokens)
        self._index.extend(known_len)

    def continuations(self, count: int, length: int) -> tuple[tuple[int, ...], ...]:
        """At most `count` distinct continuations of `length` tokens, the most probable first.

        A longer match ranks before a shorter one. Among equal lengths the later match ranks first, and matches in the
        source rank last. They begin with the tokens that the grammar forces, and end before one that it excludes.
        """
        found: dict[tuple[int, ...], None] = {}
        known, forced = self.next_tokens, self.next_tokens.forced[:length]
        looks, end_of_text = LOOKS_PER_CANDIDATE * count, len(self.tokens)
        for ngram in reversed(self._index.ending_with(forced)):
            earlier = islice((end for end in reversed(self._index.ends(ngram)) if end < end_of_text), looks)
            in_source = islice(reversed(self._source_index.ends(ngram)), looks)
            for continuation in chain(
                (self._continued(end, forced, length) for end in earlier),
                (self._source[end : end + length] for end in in_source if end < len(self._source)),
            ):
                if permitted := known.permitted((*forced, *continuation)[:length]):
                    found.setdefault(tuple(permitted))
                if len(found) == count:
                    return tuple(found)
        return tuple(found) or (forced,) * bool(forced)

    def _continued(self, position: int, forced: Sequence[int], length: int) -> list[int]:
        """The tokens from `position` on; beyond the end of the context and `forced` the repetition continues."""
        tokens = [*self.tokens[position : position + length], *forced]
        while len(tokens) < length:
            tokens += tokens
        return tokens


class NgramDrafter(SequenceDrafter[IndexedSession]):
    """Looks up each row's last tokens in the row's own context."""

    def __init__(self, settings: NgramSettings, draft: DraftSection) -> None:
        super().__init__(lambda start: IndexedSession(start, settings.min, settings.max), draft)
        self._candidates = settings.candidates

    def _proposal(self, session: IndexedSession, row: DraftRow) -> Proposal:
        budget = self._within(row.budget)
        candidates = session.continuations(self._candidates, budget.max_depth) if budget.max_depth else ()
        return Proposal(row.sequence_id, row.base_len, TokenTree.from_candidates(candidates, budget.max_nodes))


@register("ngram", NgramSettings, places=ON_TARGET_FIRST)
def create_ngram(settings: NgramSettings, draft: DraftSection, target: TargetSection) -> NgramDrafter:  # noqa: ARG001
    """Create the method `ngram`."""
    return NgramDrafter(settings, draft)
