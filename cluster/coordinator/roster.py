"""Who waits, who runs, and who has left without the workers knowing yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cluster.coordinator.stream import Stream
from cluster.core.ids import RequestId, SequenceId
from cluster.core.scheduler import SequenceView


class Roster:
    """Every live stream either waits or runs. The scheduler orders them by arrival."""

    def __init__(self) -> None:
        self.running: dict[SequenceId, Stream] = {}
        self._waiting: dict[SequenceId, Stream] = {}
        self._preempted: dict[SequenceId, Stream] = {}
        self._by_request: dict[RequestId, Stream] = {}
        self._leaving: list[Stream] = []

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._by_request.values()))

    @property
    def waiting_count(self) -> int:
        """Streams that wait: new ones and preempted ones."""
        return len(self._waiting) + len(self._preempted)

    def find(self, request_id: RequestId) -> Stream | None:
        """The live stream of a request."""
        return self._by_request.get(request_id)

    def enter(self, stream: Stream) -> None:
        """A new stream: it waits."""
        self._by_request[stream.sequence.request.request_id] = stream
        self._waiting[stream.sequence.id] = stream

    def admit(self, sequence_id: SequenceId) -> None:
        """From waiting to running; nothing when it has left meanwhile."""
        stream = self._preempted.pop(sequence_id, None) or self._waiting.pop(sequence_id, None)
        if stream is not None:
            self.running[sequence_id] = stream

    def put_back(self, sequence_id: SequenceId) -> Stream:
        """From running to waiting; its arrival keeps its place."""
        stream = self._preempted[sequence_id] = self.running.pop(sequence_id)
        return stream

    def remove(self, stream: Stream) -> bool:
        """The stream is over; whether it was live until now."""
        sequence = stream.sequence
        if self._by_request.get(sequence.request.request_id) is not stream:
            return False
        del self._by_request[sequence.request.request_id]
        for place in (self.running, self._waiting, self._preempted):
            place.pop(sequence.id, None)
        self._leaving.append(stream)
        return True

    def take_leaving(self) -> list[Stream]:
        """Those removed since the last call, of whom the workers must be told."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def waiting_views(self, most: int) -> tuple[SequenceView, ...]:
        """All that were preempted and the first `most` of the others (which wait in order of arrival)."""
        others = islice(self._waiting.values(), most)
        return tuple(_view(stream) for stream in (*self._preempted.values(), *others))

    def running_views(self) -> tuple[SequenceView, ...]:
        """All that run."""
        return tuple(_view(stream) for stream in self.running.values())


def _view(stream: Stream) -> SequenceView:
    sequence = stream.sequence
    return SequenceView(sequence.id, sequence.arrival, len(sequence), sequence.stored_len, sequence.remaining)
