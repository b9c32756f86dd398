"""One sequence of a drafter that reads hidden states: its tokens and their context."""

from __future__ import annotations

import torch

from cluster.core.request import SequenceStart
from workers.draft.common.modules.context_store import SEGMENT, ContextStore, SegmentKeys
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.common.sessions import DraftingSession


class ContextSession(DraftingSession):
    """Committed tokens, and the keys and values of those that the target showed."""

    __slots__ = ("_keys", "_lead", "_shape", "_store", "window")

    def __init__(
        self,
        start: SequenceStart,
        shape: ContextShape,
        store: ContextStore,
        device: torch.device,
        lead: int = 0,
        version: int = 0,
    ) -> None:
        """`lead` and `version`: see `SegmentKeys`."""
        super().__init__(start)
        self._lead = lead
        self._shape = shape
        self._store = store
        self._keys = SegmentKeys(start.cache_salt, lead, version)
        self.window = ContextWindow(shape, device)

    @property
    def anchor(self) -> int:
        """Position of the last committed token, whose hidden states the target has not computed."""
        return len(self.tokens) - 1

    def remove(self, length: int) -> None:
        """Remove the tokens from position `length` on, and their context."""
        super().remove(length)
        self._keys.cut(length)
        self.window.truncate(max(0, length - self._lead))

    def restore(self) -> None:
        """Take the segments that the store has of these tokens and that are not known here."""
        keys = self._keys.of(self.tokens)
        for index in range(max(0, self.anchor - self._shape.window) // SEGMENT, self.anchor // SEGMENT):
            first = index * SEGMENT
            found = None if self.window.is_known(first, first + SEGMENT) else self._store.find(keys[index])
            if found is not None:
                self.window.store(first, found)

    def add(self, first: int, rows: ContextRows) -> None:
        """Store the context of consecutive tokens, and share full segments."""
        end, begin = first + len(rows.features), first
        while begin < end:
            piece_end = min(end, begin - begin % SEGMENT + SEGMENT)
            self.window.store(begin, rows.part(begin - first, piece_end - first))
            self.share(begin, piece_end)
            begin = piece_end

    def share(self, first: int, end: int) -> None:
        """Keep the full segments that end within these positions, which are known, for other sequences."""
        keys = self._keys.of(self.tokens)
        for index in range(first // SEGMENT, min(end // SEGMENT, len(keys))):
            if self.window.is_known(index * SEGMENT, (index + 1) * SEGMENT):
                self._store.add(keys[index], self.window, index * SEGMENT)
