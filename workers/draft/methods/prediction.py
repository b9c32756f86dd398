"""Drafts from the answer that the client expects (OpenAI's `prediction`), realigned after each difference.

Without a prediction in the request there is no draft, so the method is mostly combined with another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from cluster.core.config.base import PluginSettings
from cluster.core.config.sections import DraftSection, TargetSection
from cluster.core.request import SequenceStart
from workers.draft.lookup.continuation_tree import Continuation
from workers.draft.lookup.drafter import LookupDrafter, LookupSession
from workers.draft.lookup.occurrence_index import OccurrenceIndex
from workers.draft.registry import register

_RATES = (0.25, 0.5, 0.65, 0.75, 0.82, 0.86, 0.9, 0.92, 0.94)
"""Acceptance rate assumed for a predicted token, by the number of equal tokens before it; more: the last."""
_START_MATCH = 3
"""The first token of the answer counts as if it followed a match of this length."""
_OCCURRENCES = 64
"""Most occurrences of one n-gram in the prediction that are examined, besides the places near the expected one."""


class PredictionSettings(PluginSettings):
    """Settings of drafts from the client's prediction."""

    min_match: Annotated[int, Field(ge=1, le=16)] = 3
    """Fewest equal tokens that align the answer with a distant place in the prediction."""
    max_match: Annotated[int, Field(ge=1, le=256)] = 16
    """Most tokens that are compared; longer matches count as this long."""
    window: Annotated[int, Field(ge=0, le=4096)] = 64
    """Within this many tokens of the expected place, one equal token aligns."""
    candidates: Annotated[int, Field(ge=1, le=8)] = 2
    """Most places in the prediction that are merged into one tree."""

    @model_validator(mode="after")
    def _check(self) -> PredictionSettings:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match ({self.min_match}) must be at most max_match ({self.max_match})")
        return self


class PredictionSession(LookupSession):
    """Committed tokens, and where they are in the prediction."""

    __slots__ = ("_cursor", "_cursor_len", "_index", "_indexed", "_settings")

    def __init__(self, start: SequenceStart, settings: PredictionSettings) -> None:
        super().__init__(start)
        self._settings = settings
        self._indexed: tuple[int, ...] = ()
        self._index = OccurrenceIndex([], settings.min_match, settings.max_match)
        self._cursor = 0
        """Position in the prediction that followed the answer when it was aligned last."""
        self._cursor_len = 0
        """Number of tokens of the answer then."""

    def continuations(self, length: int) -> Sequence[Continuation]:
        """See `LookupSession`."""
        self._renew()
        if not self._indexed:
            return ()
        return [Continuation(self._index.following(position, length), match) for position, match in self._places()]

    def _renew(self) -> None:
        """Index the prediction, unless this was done."""
        if self._indexed != self.start.prediction:
            self._indexed = self.start.prediction
            self._index = OccurrenceIndex([], self._settings.min_match, self._settings.max_match)
            self._index.extend(self._indexed)
            self._cursor = self._cursor_len = 0

    def _places(self) -> list[tuple[int, int]]:
        """Places in the prediction that may continue the answer, with the length of the match, most probable first."""
        settings, answer_len = self._settings, len(self.tokens) - self.start.prompt_len
        if answer_len <= 0:
            return [(0, _START_MATCH)]
        context = self.tokens[max(self.start.prompt_len, len(self.tokens) - settings.max_match) :]
        expected = max(0, self._cursor + answer_len - self._cursor_len)
        found = [
            (match, -abs(position - expected), position) for position, match in self._matches(context, expected).items()
        ]
        if not found:
            # As many tokens were replaced as were added since the last match, or the added ones were only inserted.
            return [(expected, 0), (self._cursor, 0)] if expected != self._cursor else [(expected, 0)]
        found.sort(reverse=True)
        best = found[0]
        self._cursor, self._cursor_len = best[2], answer_len
        return [(position, match) for match, _, position in found[: settings.candidates]]

    def _matches(self, context: Sequence[int], expected: int) -> dict[int, int]:
        """Places in the prediction after tokens with which `context` ends, with the number of these tokens."""
        found = self._index.find(context, _OCCURRENCES)
        window = self._settings.window
        for position in range(max(1, expected - window), min(expected + window, self._index.end) + 1):
            if self._indexed[position - 1] == context[-1] and position not in found:
                found[position] = self._index.match_length(position, context)
        return found


def _rate(match_length: int) -> float:
    return _RATES[min(match_length, len(_RATES) - 1)]


@register("prediction", PredictionSettings, placements=("target", "drafter"))
def create_prediction(
    settings: PredictionSettings,
    draft: DraftSection,
    target: TargetSection,  # noqa: ARG001 - part of the interface
) -> LookupDrafter[PredictionSession]:
    """Create the method `prediction`."""
    return LookupDrafter(lambda start: PredictionSession(start, settings), draft, _rate)
