"""Drafts from the answer that the client expects (OpenAI's `prediction`), realigned after each difference.

Without a prediction in the request there is no draft, so the method is mostly combined with another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, overload

from pydantic import Field, model_validator

from cluster.core.config.base import PluginSettings
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.request import SequenceStart
from workers.draft.lookup.alignment import Alignment
from workers.draft.lookup.continuation_tree import Continuation
from workers.draft.lookup.lookup_drafter import LookupDrafter, LookupSession
from workers.draft.registry import ON_TARGET_FIRST, register

_RATES = (0.25, 0.5, 0.65, 0.75, 0.82, 0.86, 0.9, 0.92, 0.94)
"""Acceptance rate assumed for a predicted token, by the number of equal tokens before it; more: the last."""


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


class _Answer(Sequence[int]):
    """The tokens of a text from a position on, and those after it, without a copy of them. Positions are not
    negative."""

    __slots__ = ("_after", "_begin", "_own", "_text")

    def __init__(self, text: Sequence[int], begin: int, after: Sequence[int]) -> None:
        self._text, self._begin, self._after = text, begin, after
        self._own = max(0, len(text) - begin)

    def __len__(self) -> int:
        return self._own + len(self._after)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, slice):
            first, end, _ = place.indices(len(self))
            found = self._text[self._begin + first : self._begin + max(first, end)]
            return found if end <= self._own else [*found, *self._after[max(0, first - self._own) : end - self._own]]
        return self._text[self._begin + place] if place < self._own else self._after[place - self._own]


class PredictionSession(LookupSession):
    """Committed tokens, and where the answer is in the prediction."""

    __slots__ = ("_aligned_for", "_alignment", "_settings")

    def __init__(self, start: SequenceStart, settings: PredictionSettings) -> None:
        super().__init__(start)
        self._settings = settings
        self._alignment = self._aligned()
        self._aligned_for = start.prediction

    def continuations(self, forced: Sequence[int], length: int) -> Sequence[Continuation]:
        """Possible continuations of the committed tokens and the tokens `forced`, of at most `length` tokens."""
        if self._aligned_for is not self.start.prediction:  # equal ones are compared once, and not at each draft
            if self._aligned_for != self.start.prediction:
                self._alignment = self._aligned()
            self._aligned_for = self.start.prediction
        if not self.start.prediction:
            return ()
        settings, answer = self._settings, _Answer(self.tokens, self.start.prompt_len, forced)
        return self._alignment.continuations(answer, settings.max_match, settings.candidates, length)

    def _aligned(self) -> Alignment:
        settings = self._settings
        return Alignment(self.start.prediction, settings.min_match, settings.max_match, settings.window)


def _rate(match_length: int) -> float:
    """The acceptance rate; below 0, the chance is halved for each."""
    return _RATES[min(match_length, len(_RATES) - 1)] if match_length >= 0 else _RATES[0] * 2.0**match_length


@register("prediction", PredictionSettings, places=ON_TARGET_FIRST)
def create_prediction(
    settings: PredictionSettings,
    draft: DraftSection,
    target: TargetSection,  # noqa: ARG001 - part of the interface
) -> LookupDrafter[PredictionSession]:
    """Create the method `prediction`."""
    return LookupDrafter(lambda start: PredictionSession(start, settings), draft, _rate)
