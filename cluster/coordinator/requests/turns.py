"""The turns of sequences that have not started yet."""

from __future__ import annotations

from typing import NamedTuple

from cluster.core.ids import SequenceId
from cluster.core.queueing.fair_queue import FairQueue


class _Turn(NamedTuple):
    at: int
    flow: str
    cost: int


class Turns:
    """Gives every sequence its turn, and follows which of them have started."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._waiting: dict[SequenceId, _Turn] = {}
        self._flows: dict[str, int] = {}

    def give(self, sequence_id: SequenceId, flow: str, cost: int) -> int:
        """Return the turn of a new sequence."""
        turn, self._queue = self._queue.enter(flow, cost)
        self._waiting[sequence_id] = _Turn(turn, flow, cost)
        self._flows[flow] = self._flows.get(flow, 0) + 1
        return turn

    def waits(self, sequence_id: SequenceId) -> bool:
        """Whether the sequence has a turn and has not started."""
        return sequence_id in self._waiting

    def start(self, sequence_id: SequenceId) -> None:
        """Record that a sequence starts. Does nothing if it has started before."""
        turn = self._waiting.pop(sequence_id, None)
        if turn is not None:
            self._queue = self._queue.start(turn.at, turn.cost, len(self._flows))
            self._count_out(turn.flow)

    def leave(self, sequence_id: SequenceId) -> None:
        """Record that a sequence has ended. One that had not started uses nothing."""
        turn = self._waiting.pop(sequence_id, None)
        if turn is not None and self._count_out(turn.flow):
            self._queue = self._queue.leave(turn.flow)

    def _count_out(self, flow: str) -> bool:
        """Count one waiting sequence less. Returns whether it was the last one of the flow."""
        self._flows[flow] -= 1
        if self._flows[flow]:
            return False
        del self._flows[flow]
        return True
