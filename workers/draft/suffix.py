"""Drafts what followed the last tokens earlier: in the same request, and in the latest outputs of other requests.

Occurrences of the text's end are found in the prompt and answer (as in prompt lookup), in the source of an
encoder-decoder model, and in a store of recent outputs (as in SuffixDecoding, Oliaro et al. 2024, and REST, He et al.
2023). What followed them is merged into one tree with estimated probabilities. Only requests with the same API key and
the same `cache_salt` share outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from cluster.core.config.base import PluginSettings
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.request import SequenceStart
from workers.draft.lookup.continuation_tree import Continuation
from workers.draft.lookup.lookup_drafter import LookupDrafter, LookupSession
from workers.draft.lookup.occurrence_index import SEPARATOR, OccurrenceIndex
from workers.draft.registry import ON_TARGET_FIRST, register

_RATES = (0.2, 0.3, 0.45, 0.55, 0.62, 0.7, 0.78, 0.84, 0.88)
"""Acceptance rate assumed for a token that followed one match, by the match's length from 0; longer: the last."""


class SuffixSettings(PluginSettings):
    """Settings of drafts from earlier text."""

    min_match: Annotated[int, Field(ge=1, le=16)] = 2
    """Fewest tokens that must be equal before a drafted one."""
    max_match: Annotated[int, Field(ge=1, le=256)] = 32
    """Most tokens that are compared; longer matches count as this long."""
    occurrences: Annotated[int, Field(ge=1, le=256)] = 16
    """Most earlier occurrences that one draft uses, of the request's own text and of the store each."""
    store_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1 << 16
    """Most tokens of finished outputs that are kept for later requests, over all salts; 0 keeps none."""

    @model_validator(mode="after")
    def _check(self) -> SuffixSettings:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match ({self.min_match}) must be at most max_match ({self.max_match})")
        return self


class OutputStore:
    """The latest outputs of finished requests, which later requests with the same salt draft from.

    At most `most_tokens` tokens of outputs, over all salts; the oldest outputs are evicted first.
    Requests with different salts share nothing, so that no tenant gets drafts from another tenant's text.
    """

    def __init__(self, most_tokens: int, shortest: int, longest: int) -> None:
        self._most_tokens = most_tokens
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[str, OccurrenceIndex] = {}
        self._outputs: deque[tuple[str, int]] = deque()
        """Salt and number of tokens of each output, the oldest first; the separator counts."""
        self._token_count = 0

    def __len__(self) -> int:
        """Number of stored tokens, separators included."""
        return self._token_count

    @property
    def salts(self) -> frozenset[str]:
        """Salts with stored outputs."""
        return frozenset(self._indexes)

    def index(self, salt: str) -> OccurrenceIndex | None:
        """The outputs of one salt, with a separator after each; `None` if there are none."""
        return self._indexes.get(salt)

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Add an output, or its end if it is longer than the whole store."""
        tokens = tokens[max(0, len(tokens) + 1 - self._most_tokens) :]
        if len(tokens) <= self._shortest:
            return  # nothing could follow a match
        while self._token_count + len(tokens) + 1 > self._most_tokens:
            self._evict_oldest()
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = OccurrenceIndex([], self._shortest, self._longest)
        index.extend([*tokens, SEPARATOR])
        self._outputs.append((salt, len(tokens) + 1))
        self._token_count += len(tokens) + 1

    def _evict_oldest(self) -> None:
        salt, count = self._outputs.popleft()
        self._token_count -= count
        index = self._indexes[salt]
        index.evict(count)
        if not index.tokens:
            del self._indexes[salt]


class SuffixSession(LookupSession):
    """Committed tokens and a source, indexed, beside the outputs of other requests."""

    __slots__ = ("_index", "_settings", "_source", "_store")

    def __init__(self, start: SequenceStart, settings: SuffixSettings, store: OutputStore) -> None:
        super().__init__(start)
        self._settings = settings
        self._store = store
        self._index = OccurrenceIndex(self.tokens, settings.min_match, settings.max_match)
        self._source = OccurrenceIndex([], settings.min_match, settings.max_match)
        self._source.extend(start.source)

    def continuations(self, forced: Sequence[int], length: int) -> Sequence[Continuation]:
        """Possible continuations of the committed tokens and the tokens `forced`, of at most `length` tokens."""
        settings = self._settings
        context = [*self.tokens[-settings.max_match :], *forced][-settings.max_match :]
        found = [
            Continuation(self._repeated(position, forced, length), match)
            for position, match in self._index.find(context, settings.occurrences).items()
        ]
        found += [
            Continuation(self._source.following(position, length), match)
            for position, match in self._source.find(context, settings.occurrences).items()
        ]
        outputs = self._store.index(self.start.cache_salt)
        if outputs is not None:
            found += [
                Continuation(outputs.following(position, length), match, DraftOrigin.EARLIER)
                for position, match in outputs.find(context, settings.occurrences).items()
            ]
        return found

    def remove(self, length: int) -> None:
        """Remove the tokens from position `length` on."""
        self._index.cut(length)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._index.extend(tokens)

    def store_output(self) -> None:
        """Add the answer to the store, after as much of the prompt as a match may have."""
        answer = self.start.prompt_len
        if len(self.tokens) > answer:
            self._store.add(self.start.cache_salt, self.tokens[max(0, answer - self._settings.max_match) :])

    def _repeated(self, position: int, forced: Sequence[int], length: int) -> list[int]:
        """The tokens from `position` on; beyond the end of the text and `forced` the repetition continues."""
        tokens = [*self.tokens[position : position + length], *forced]
        while len(tokens) < length:
            tokens += tokens
        return tokens[:length]


def _rate(match_length: int) -> float:
    return _RATES[min(match_length, len(_RATES) - 1)]


@register("suffix", SuffixSettings, places=ON_TARGET_FIRST)
def create_suffix(
    settings: SuffixSettings,
    draft: DraftSection,
    target: TargetSection,  # noqa: ARG001 - part of the interface
) -> LookupDrafter[SuffixSession]:
    """Create the method `suffix`."""
    store = OutputStore(settings.store_tokens, settings.min_match, settings.max_match)

    def create(start: SequenceStart) -> SuffixSession:
        return SuffixSession(start, settings, store)

    return LookupDrafter(create, draft, _rate, SuffixSession.store_output)
