"""The clients of the coordinators, and the streams that run on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.core.ids import RequestId
from cluster.core.membership import Member
from cluster.ingress.client import FullClient
from cluster.ingress.router.choice import RUNNING_BLOCKS, compatible, is_stalled

WATCH_SECONDS = 0.5
"""How often running streams are compared with the view, in seconds."""
SILENT_SECONDS = 2.0
"""A stream that brought nothing for this long is lost if its coordinator is no longer in the view, in seconds."""


@dataclass(slots=True, eq=False)
class RunningStream:
    """A stream on one coordinator."""

    request_id: RequestId
    coordinator: Member
    client: FullClient
    blocks: int
    """Load of the stream: blocks of its prompt that must be computed, and `RUNNING_BLOCKS` for decoding."""
    active_at: float
    """Time of the last response on the event loop's clock, in seconds."""
    waiting: asyncio.Task[object] | None = None
    """The task that waits for the next response."""
    is_aborted: bool = False
    """Whether the caller aborted the request."""
    may_move: bool = True
    """Whether it is ended when its coordinator is stalled and another one is not."""
    has_moved: bool = False
    """Whether it was ended for that reason."""
    _cancels: int = 0
    """How often something else had cancelled the task when its wait began."""
    _is_ended: bool = False

    def wait(self) -> None:
        """Record that the current task begins to wait for a response. `asyncio.timeout` takes ten times as long."""
        self.waiting = task = asyncio.current_task()
        self._cancels = 0 if task is None else task.cancelling()
        self._is_ended = False

    def end_wait(self) -> None:
        """End the wait with a cancellation, after which `is_given_up` is true. Does nothing if no task waits."""
        task, self.waiting = self.waiting, None
        if task is not None:
            self._is_ended = True
            task.cancel()

    def is_given_up(self) -> bool:
        """Whether `end_wait` alone has cancelled the current task. The cancellation is then undone."""
        task = asyncio.current_task()
        return self._is_ended and task is not None and task.uncancel() <= self._cancels


class CoordinatorPool:
    """One client per coordinator in the view.

    A silent stream is ended if its coordinator left the view, or is stalled while another one is not.
    """

    def __init__(self, members: Callable[[], Sequence[Member]], connect: Callable[[str], FullClient]) -> None:
        self._members = members
        self._connect = connect
        self._clients: dict[tuple[str, str], FullClient] = {}  # by id and address
        self._streams: dict[RequestId, list[RunningStream]] = {}
        self._in_flight: Counter[str] = Counter()
        self._watch: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def members(self) -> Sequence[Member]:
        """Return the coordinators in the view."""
        return self._members()

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Load of the streams by coordinator, in blocks."""
        return self._in_flight

    def client(self, view: Member) -> FullClient:
        """Return the client of a coordinator."""
        key = (view.id, view.address)
        if key not in self._clients:
            self._drop_unused()
            self._clients[key] = self._connect(view.address)
        return self._clients[key]

    def stream(self, request_id: RequestId) -> RunningStream | None:
        """Return the stream of a request, if it runs."""
        streams = self._streams.get(request_id)
        return streams[-1] if streams else None

    @contextmanager
    def running(self, request_id: RequestId, view: Member, missing: int) -> Iterator[RunningStream]:
        """Count a stream as in flight inside the block. `missing` blocks of its prompt must be computed first."""
        now = asyncio.get_running_loop().time()
        stream = RunningStream(request_id, view, self.client(view), missing + RUNNING_BLOCKS, now)
        self._streams.setdefault(request_id, []).append(stream)
        self._in_flight[view.id] += stream.blocks
        if self._watch is None:
            self._schedule()
        try:
            yield stream
        finally:
            streams = self._streams[request_id]
            streams.remove(stream)
            if not streams:
                del self._streams[request_id]
            self._in_flight[view.id] -= stream.blocks
            if not self._in_flight[view.id]:
                del self._in_flight[view.id]

    def note_response(self, stream: RunningStream) -> None:
        """Record a response of a stream: it is alive, and its prompt has been computed."""
        stream.active_at = asyncio.get_running_loop().time()
        if stream.blocks != RUNNING_BLOCKS:
            self._in_flight[stream.coordinator.id] -= stream.blocks - RUNNING_BLOCKS
            stream.blocks = RUNNING_BLOCKS

    async def close(self) -> None:
        """Close all clients. Running streams break off."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _schedule(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        """End the silent streams of coordinators that left the view, or that are stalled while another one is not."""
        self._watch = None
        if not self._streams:
            return
        self._schedule()
        now = asyncio.get_running_loop().time()
        present = {view.id: view for view in self._members()}
        for streams in self._streams.values():
            for stream in streams:
                if now - stream.active_at <= SILENT_SECONDS or stream.waiting is None:
                    continue
                view = present.get(stream.coordinator.id)
                if view is not None and not (stream.may_move and _has_better(view, present.values())):
                    continue
                stream.has_moved = view is not None
                stream.end_wait()

    def _drop_unused(self) -> None:
        """Close the clients of coordinators that left the view and have no stream."""
        used = {(view.id, view.address) for view in self._members()}
        used |= {(one.coordinator.id, one.coordinator.address) for all_ in self._streams.values() for one in all_}
        for key in self._clients.keys() - used:
            closing = asyncio.create_task(self._clients.pop(key).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _has_better(view: Member, others: Collection[Member]) -> bool:
    """Whether the coordinator is stalled, and another one could continue its streams at once."""
    accepting = [one for one in others if not is_stalled(one) and not one.is_draining]
    return is_stalled(view) and bool(accepting) and bool(compatible(accepting, view.id))
