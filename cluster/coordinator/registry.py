"""Who waits, who runs, who has ended and is still of use, and who has left without the workers knowing yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cluster.coordinator.output_stream import Stream
from cluster.coordinator.running import Lane
from cluster.core.ids import RequestId, SequenceId
from cluster.core.scheduler import SequenceView


class Roster:
    """Every lane of a live stream is in one place. The scheduler orders them by arrival."""

    def __init__(self) -> None:
        self.running: dict[SequenceId, Lane] = {}
        self.places = 0
        """What the live streams weigh: most sequences that they may have at a time."""
        self._waiting: dict[SequenceId, Lane] = {}
        self._returning: dict[SequenceId, Lane] = {}
        self._ended: dict[SequenceId, Lane] = {}
        self._streams: dict[RequestId, Stream] = {}
        self._leaving: list[Lane] = []

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._streams.values()))

    @property
    def waiting_count(self) -> int:
        """Lanes that wait: new ones, preempted ones, and those that are to share what an earlier one stored."""
        return len(self._waiting) + len(self._returning)

    def find(self, request_id: RequestId) -> Stream | None:
        """The live stream of a request."""
        return self._streams.get(request_id)

    def lanes(self) -> list[Lane]:
        """All lanes of the live streams."""
        return [lane for stream in self._streams.values() for lane in stream.lanes.values()]

    def enter(self, stream: Stream) -> None:
        """A new stream, without lanes yet."""
        self._streams[stream.id] = stream
        self.places += stream.course.places

    def wait(self, lane: Lane) -> None:
        """A new lane of a live stream: it waits, before those who arrived later."""
        lane.stream.lanes[lane.id] = lane
        (self._waiting if lane.parent is None else self._returning)[lane.id] = lane

    def admit(self, sequence_id: SequenceId) -> None:
        """From waiting to running; nothing when it has left meanwhile."""
        lane = self._returning.pop(sequence_id, None) or self._waiting.pop(sequence_id, None)
        if lane is not None:
            self.running[sequence_id] = lane

    def put_back(self, sequence_id: SequenceId) -> Lane | None:
        """From running to waiting; its arrival keeps its place. `None` when it has left meanwhile."""
        lane = self.running.pop(sequence_id, None)
        if lane is not None:
            self._returning[sequence_id] = lane
        return lane

    def end(self, lane: Lane) -> None:
        """It decides no more. It leaves when nobody can share what it stored any more."""
        if lane.stream.lanes.get(lane.id) is lane:
            self._take_out(lane)
            self._ended[lane.id] = lane

    def remove(self, stream: Stream) -> bool:
        """The stream is over; whether it was live until now."""
        if self._streams.get(stream.id) is not stream:
            return False
        del self._streams[stream.id]
        self.places -= stream.course.places
        for lane in stream.lanes.values():
            self._take_out(lane)
            self._leaving.append(lane)
        stream.lanes.clear()
        return True

    def take_leaving(self) -> list[Lane]:
        """Those that left since the last call, of whom the workers must be told."""
        if self._ended:
            parents = {lane.parent for lane in (*self._returning.values(), *self.running.values())}
            self._leave([lane for lane in self._ended.values() if not lane.expects_heirs and lane not in parents])
        leaving, self._leaving = self._leaving, []
        return leaving

    def dismiss_ended(self) -> list[Lane]:
        """Whoever has ended leaves, of use or not."""
        dismissed = list(self._ended.values())
        self._leave(dismissed)
        return dismissed

    def waiting_views(self, most: int) -> tuple[SequenceView, ...]:
        """All that came before and the first `most` of the new (which wait in order of arrival)."""
        new = islice(self._waiting.values(), most)
        return tuple(lane.view() for lane in (*self._returning.values(), *new))

    def running_views(self) -> tuple[SequenceView, ...]:
        """All that run."""
        return tuple(lane.view() for lane in self.running.values())

    def _leave(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            del lane.stream.lanes[lane.id]
            self._take_out(lane)
            self._leaving.append(lane)

    def _take_out(self, lane: Lane) -> None:
        for place in (self.running, self._waiting, self._returning, self._ended):
            place.pop(lane.id, None)
