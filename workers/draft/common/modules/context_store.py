"""Keeps what drafting modules computed for earlier sequences, for later ones with the same first tokens.

A target that finds a prefix in its cache computes no hidden states for it, and a drafter receives none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.draft.common.modules.context_window import ContextRows, ContextWindow
from workers.kv.prefix_cache import next_key, root_key

SEGMENT = 16
"""Tokens per segment."""


class ContextStore:
    """Segments of positions by the hash of all tokens up to their end. The least recently used ones are dropped."""

    def __init__(self, most_tokens: int, dtype: torch.dtype) -> None:
        self._most = most_tokens // SEGMENT
        self._dtype = dtype
        self._segments: OrderedDict[bytes, ContextRows] = OrderedDict()

    def __len__(self) -> int:
        return len(self._segments)

    def find(self, key: bytes) -> ContextRows | None:
        """The segment with this key."""
        found = self._segments.get(key)
        if found is not None:
            self._segments.move_to_end(key)
        return found

    def add(self, key: bytes, window: ContextWindow, first: int) -> None:
        """Keep a copy of the segment that begins at position `first`, unless it is kept already."""
        if not self._most or self.find(key) is not None:
            return
        while len(self._segments) >= self._most:
            self._segments.popitem(last=False)
        self._segments[key] = window.stored(first, first + SEGMENT).copied(self._dtype)


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """The memory of a drafter that keeps keys and values of positions."""

    store: ContextStore
    """What later sequences with the same beginning find."""
    sequences: int
    """Most sequences whose keys and values are kept."""


class SegmentKeys:
    """The keys of one sequence's full segments.

    With `lead` 1, what is kept of a position depends on the token after it, too: a segment of positions then has the
    key of all tokens up to the one after its end. Segments that were computed with other weights, whose `version` is
    another one, have other keys.
    """

    def __init__(self, salt: str, lead: int = 0, version: int = 0) -> None:
        self._root = next_key(root_key(salt), (version,)) if version else root_key(salt)
        self._lead = lead
        self._keys: list[bytes] = []

    def cut(self, length: int) -> None:
        """Drop the segments that depend on a token at or after position `length`."""
        del self._keys[max(0, length - self._lead) // SEGMENT :]

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of all full segments of `tokens`, which continue those of the last call."""
        while (len(self._keys) + 1) * SEGMENT + self._lead <= len(tokens):
            first, end = len(self._keys) * SEGMENT, (len(self._keys) + 1) * SEGMENT + self._lead
            before = self._keys[-1] if self._keys else self._root
            self._keys.append(next_key(before, tokens[first:end]))
        return self._keys
