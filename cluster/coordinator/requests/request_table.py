"""The table of live requests and their sequences: waiting, running, finished, and to be released."""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cluster.coordinator.requests.decoding_strategy import NewSequence
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.fair_queue import FairQueue, QueuedRequest, expected_cost, flow_of
from cluster.core.ids import RequestId, SequenceId
from cluster.core.sequence import Sequence


class _Turn(NamedTuple):
    at: int
    flow: str
    cost: int

    @property
    def end(self) -> int:
        return self.at + self.cost


class Turns:
    """Gives every sequence its turn, and follows which of them have started."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._waiting: dict[SequenceId, _Turn] = {}
        self._flows: dict[str, dict[SequenceId, _Turn]] = {}
        """The turns that wait, by flow, in order."""
        self._started: dict[str, int] = {}
        """The end of the last turn that has started, of each flow that is ahead of the virtual time."""

    def give(self, sequence_id: SequenceId, flow: str, cost: int) -> int:
        """Return the turn of a new sequence."""
        at, self._queue = self._queue.enter(flow, cost)
        self._waiting[sequence_id] = self._flows.setdefault(flow, {})[sequence_id] = _Turn(at, flow, cost)
        return at

    def start(self, sequence_id: SequenceId) -> None:
        """Record that a sequence starts. Does nothing if it has started before."""
        flows = len(self._flows)
        turn = self._take(sequence_id)
        if turn is not None:
            self._queue = self._queue.start(turn.at, turn.cost, flows)
            self._started[turn.flow] = max(turn.end, self._started.get(turn.flow, 0))
            self._started = {flow: end for flow, end in self._started.items() if flow in self._queue.used}

    def leave(self, sequence_id: SequenceId) -> None:
        """Record that a sequence has ended. One that had not started uses nothing."""
        turn = self._take(sequence_id)
        if turn is not None:
            waiting = self._flows.get(turn.flow)
            last = waiting[next(reversed(waiting))].end if waiting else 0
            self._queue = self._queue.leave(turn.flow, max(last, self._started.get(turn.flow, 0)))

    def _take(self, sequence_id: SequenceId) -> _Turn | None:
        """Remove a turn from those that wait, and return it."""
        turn = self._waiting.pop(sequence_id, None)
        if turn is not None:
            waiting = self._flows[turn.flow]
            del waiting[sequence_id]
            if not waiting:
                del self._flows[turn.flow]
        return turn


class RequestTable:
    """Every sequence of a live request is in exactly one state. The scheduler serves them in their `order`."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, LiveRequest] = {}
        self._slots = 0
        self._running: dict[SequenceId, LiveSequence] = {}
        self._new: dict[SequenceId, LiveSequence] = {}
        self._new_in_order: list[tuple[tuple[int, int, int], SequenceId]] = []  # a heap; some have left `_new`
        self._resuming: dict[SequenceId, LiveSequence] = {}
        self._finished: dict[SequenceId, LiveSequence] = {}
        self._to_release: list[LiveSequence] = []
        self._name = secrets.token_hex(6)  # coordinators of one target must not use the same sequence id
        self._started = 0
        self._turns = Turns()
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._requests.values()))

    @property
    def slots(self) -> int:
        """Most sequences that the live requests may run at a time, all together."""
        return self._slots

    @property
    def running(self) -> Mapping[SequenceId, LiveSequence]:
        """The running sequences."""
        return self._running

    @property
    def waiting_count(self) -> int:
        """Number of sequences that wait: new ones, preempted ones, and forks."""
        return len(self._new) + len(self._resuming)

    def find(self, request_id: RequestId) -> LiveRequest | None:
        """Return the live request with that id."""
        return self._requests.get(request_id)

    def request_of(self, live: LiveSequence) -> LiveRequest | None:
        """Return the live request that the sequence belongs to; `None` when the request has ended."""
        request = self._requests.get(live.request_id)
        return request if request is not None and request.owns(live) else None

    def sequences(self) -> list[LiveSequence]:
        """All sequences of the live requests."""
        return [live for request in self._requests.values() for live in request.sequences]

    async def wait_until_empty(self) -> None:
        """Return when no request is live."""
        if self._requests:
            await self._empty.wait()

    # --- requests ---

    def add(self, request: LiveRequest) -> None:
        """Add a request and start its first sequences."""
        self._requests[request.id] = request
        self._slots += request.strategy.slots
        self._empty.clear()
        self.start(request, request.strategy.start())

    def start(self, request: LiveRequest, new: Iterable[NewSequence]) -> None:
        """Add new sequences of a live request to those that wait."""
        started: list[LiveSequence] = []
        for one in new:
            self._started += 1
            sequence_id = SequenceId(f"{self._name}-{self._started}")
            sequence = Sequence(sequence_id, one.request, request.arrival + one.slot)
            parent = None if one.parent is None else request.in_slot(one.parent)
            turn = self._turn(request, sequence)
            live = LiveSequence(sequence, request.id, one, parent, turn)
            started.append(live)
        if started:
            request.mark_forked()
        for live in started:
            request.add(live)
            if live.parent is None:
                self._new[live.id] = live
                heapq.heappush(self._new_in_order, (live.order, live.id))
            else:
                self._resuming[live.id] = live

    def queued(self) -> Iterator[QueuedRequest]:
        """Yield all live requests in order of arrival, for the choice of what a full queue refuses."""
        for request in self._requests.values():
            priority = request.request.priority
            yield QueuedRequest(request.id, _flow(request), request.strategy.slots, request.has_run, priority)

    def remove(self, request: LiveRequest) -> bool:
        """Remove a request and all its sequences. Returns whether it was live until now."""
        if self._requests.get(request.id) is not request:
            return False
        del self._requests[request.id]
        self._slots -= request.strategy.slots
        for live in request.sequences:
            self._take_out(live)
            self._to_release.append(live)
        request.close()
        if not self._requests:
            self._empty.set()
        return True

    # --- sequences ---

    def admit(self, sequence_id: SequenceId, now: float) -> None:
        """Move a waiting sequence to running at the time `now`. Does nothing when the sequence has ended."""
        self._turns.start(sequence_id)
        live = self._resuming.pop(sequence_id, None) or self._new.pop(sequence_id, None)
        if live is not None:
            self._running[sequence_id] = live
            if (request := self._requests.get(live.request_id)) is not None:
                request.mark_running(now)

    def preempt(self, sequence_id: SequenceId) -> LiveSequence | None:
        """Move a running sequence back to waiting, at its place in the order. Returns `None` when it has ended."""
        live = self._running.pop(sequence_id, None)
        if live is not None:
            self._resuming[sequence_id] = live
        return live

    def finish(self, live: LiveSequence) -> None:
        """Mark a sequence as finished. It is released once no other sequence can share its KV."""
        if self.request_of(live) is not None:
            self._take_out(live)
            self._finished[live.id] = live

    def drop_finished(self) -> list[LiveSequence]:
        """Release all finished sequences, even those whose KV others could still share. Returns them."""
        dropped = list(self._finished.values())
        self._drop(dropped)
        return dropped

    def take_released(self) -> list[LiveSequence]:
        """Return the sequences that ended since the last call. The workers must release them."""
        if self._finished:
            parents = {live.parent for live in (*self._resuming.values(), *self._running.values())}
            self._drop([live for live in self._finished.values() if not live.may_fork and live not in parents])
        released, self._to_release = self._to_release, []
        return released

    def waiting(self, most_new: int) -> Iterator[LiveSequence]:
        """Yield the waiting sequences: all preempted ones, then the first `most_new` new ones."""
        yield from self._resuming.values()
        yield from self._first_new(most_new)

    def _first_new(self, most: int) -> list[LiveSequence]:
        """The first `most` new sequences, in time that hardly grows with the number that wait."""
        heap = self._new_in_order
        if len(heap) > 2 * len(self._new) + 64:
            heap[:] = [(live.order, live.id) for live in self._new.values()]
            heapq.heapify(heap)
        first: list[tuple[tuple[int, int, int], SequenceId]] = []
        while heap and len(first) < most:
            entry = heapq.heappop(heap)
            if entry[1] in self._new:
                first.append(entry)
        for entry in first:
            heapq.heappush(heap, entry)
        return [self._new[sequence_id] for _, sequence_id in first]

    def _drop(self, sequences: list[LiveSequence]) -> None:
        for live in sequences:
            request = self.request_of(live)
            if request is not None:
                request.drop(live)
            self._take_out(live)
            self._to_release.append(live)

    def _turn(self, request: LiveRequest, sequence: Sequence) -> int:
        """Return the turn of a new sequence. All beams of a search have one turn, since none can go on alone."""
        siblings = request.sequences
        if request.request.beam is not None and siblings:
            return next(iter(siblings)).turn
        cost = expected_cost(len(sequence), sequence.remaining)
        return self._turns.give(sequence.id, _flow(request), cost)

    def _take_out(self, live: LiveSequence) -> None:
        self._turns.leave(live.id)
        for state in (self._running, self._new, self._resuming, self._finished):
            state.pop(live.id, None)


def _flow(request: LiveRequest) -> str:
    return flow_of(request.request.client, request.id)
