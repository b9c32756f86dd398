"""Keeps what the target showed of each sequence until its drafter is called."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.drafting import Evidence
from cluster.core.ids import SequenceId

MAX_STEPS = 256
"""Most steps of one sequence whose evidence is kept; the oldest go first. Drafters cope with gaps."""
MAX_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of hidden states that are kept of one sequence; those of the first positions go first. One step of a
target in another process brings no more of all its sequences."""
MAX_TOTAL_BYTES = 32 * MAX_BYTES
"""Most bytes of hidden states that are kept of all sequences; those of the sequence with the most go first."""
_LEFT_SHARE = 3 / 4
"""Share that is left of too many bytes: what is left is copied, which each further step must not cause again."""


class EvidenceStore:
    """Evidence by sequence, oldest first, within bounds."""

    def __init__(self, most_bytes: float = MAX_BYTES, most_total_bytes: float = MAX_TOTAL_BYTES) -> None:
        """`most_bytes` bounds the hidden states that are kept of one sequence, `most_total_bytes` those of all."""
        self._most_bytes = most_bytes
        self._most_total_bytes = most_total_bytes
        self._total_bytes = 0
        self._kept: dict[SequenceId, deque[Evidence]] = {}
        self._bytes: dict[SequenceId, int] = {}

    def add(self, sequence_id: SequenceId, evidence: Evidence) -> None:
        """Append the evidence of one step."""
        kept = self._kept.get(sequence_id)
        if kept is None or (kept and evidence.base_len < kept[-1].base_len):  # the sequence was sent again
            kept = self._kept[sequence_id] = deque()
            self._note_size(sequence_id, 0)
        kept.append(evidence)
        size = self._bytes[sequence_id] + _size(evidence)
        while len(kept) > MAX_STEPS:
            size -= _size(kept.popleft())
        if size > self._most_bytes:
            size = _shorten(kept, size, int(self._most_bytes * _LEFT_SHARE))
        self._note_size(sequence_id, size)
        while self._total_bytes > self._most_total_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            size = self._bytes[largest]
            self._note_size(largest, _shorten(self._kept[largest], size, int(size * _LEFT_SHARE)))

    def size(self, sequence_id: SequenceId) -> int:
        """Bytes of hidden states that are kept of a sequence."""
        return self._bytes.get(sequence_id, 0)

    def positions(self, sequence_id: SequenceId) -> int:
        """Number of positions of a sequence whose hidden states are kept."""
        kept = self._kept.get(sequence_id)
        hidden = kept[-1].hidden if kept else None
        return 0 if hidden is None else self._bytes[sequence_id] // (2 * hidden.width)

    def take(self, sequence_id: SequenceId, most_bytes: int | None = None) -> tuple[Evidence, ...]:
        """Remove and return the evidence of a sequence: the latest, with at most `most_bytes` of hidden states."""
        kept = self._kept.pop(sequence_id, deque())
        size = self._bytes.pop(sequence_id, 0)
        self._total_bytes -= size
        if most_bytes is not None:
            _shorten(kept, size, most_bytes)
        return tuple(kept)

    def _note_size(self, sequence_id: SequenceId, size: int) -> None:
        self._total_bytes += size - self._bytes.get(sequence_id, 0)
        self._bytes[sequence_id] = size


def largest_share(sizes: Iterable[int], most_bytes: int) -> int:
    """Return the most bytes that each of several may have so that all together have at most `most_bytes`.

    Who has less leaves the rest to the others.
    """
    ordered = sorted(sizes)
    left = most_bytes
    for index, size in enumerate(ordered):
        share = left // (len(ordered) - index)
        if size > share:
            return share
        left -= size
    return most_bytes


def _shorten(kept: deque[Evidence], size: int, most_bytes: int) -> int:
    """Drop the first positions of `size` bytes of hidden states until at most `most_bytes` are left; return those.

    Of a step that does not fit, the latest positions stay: a draft needs the last ones.
    """
    while size > most_bytes:
        oldest = kept.popleft()
        size -= _size(oldest)
        hidden = oldest.hidden
        if hidden is not None and (count := max(0, most_bytes - size) // (2 * hidden.width)):
            latest = hidden.latest(count)
            own = replace(latest, data=bytes(latest.data))  # a part of a buffer would keep all of it in memory
            kept.appendleft(replace(oldest, hidden=own))
            size += len(own.data)
    return size


def _size(evidence: Evidence) -> int:
    return 0 if evidence.hidden is None else len(evidence.hidden.data)
