"""One request while it lives: its sequences, and the way of its commits to whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from cluster.coordinator.running import Lane
from cluster.coordinator.samples import Course
from cluster.core.errors import PilotfishError
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import Commit, GenerationRequest, Usage


class Stream:
    """Commits in, commits out. Its queue is bounded by nature: an answer has `max_tokens` at most."""

    __slots__ = (
        "_latest_at",
        "_queue",
        "arrived_at",
        "course",
        "expiry",
        "first_arrival",
        "lanes",
        "places",
        "request",
        "token_count",
        "unfinished",
    )

    def __init__(self, request: GenerationRequest, course: Course, first_arrival: int, arrived_at: float) -> None:
        self.request = request
        self.course = course
        self.first_arrival = first_arrival
        """Order of arrival of its place 0; the others follow."""
        self.arrived_at = arrived_at
        """On the coordinator's clock."""
        self.places: dict[int, Lane] = {}
        """Who has each place now."""
        self.lanes: dict[SequenceId, Lane] = {}
        """All that wait, run, or have ended and are still of use."""
        self.unfinished = set(range(course.answers))
        """Answers that had no commit with `finish` yet."""
        self.token_count = 0
        """Tokens that were emitted."""
        self.expiry: asyncio.TimerHandle | None = None
        """Rings at the deadline."""
        self._latest_at: dict[int, float] = {}
        self._queue: asyncio.Queue[Commit | PilotfishError] = asyncio.Queue()

    @property
    def id(self) -> RequestId:
        """Its request's."""
        return self.request.request_id

    def usage(self, answer: int) -> Usage:
        """What an answer has cost so far."""
        lane = self.writer(answer)
        return Usage(len(self.request.prompt)) if lane is None else lane.sequence.usage()

    def writer(self, answer: int) -> Lane | None:
        """The lane that writes an answer, if there is one already."""
        return next((lane for lane in self.places.values() if lane.answer == answer), None)

    def mark(self, answer: int, now: float) -> tuple[bool, float | None]:
        """Tokens were committed to an answer: whether they are the stream's first, and how long after its latest."""
        is_first = not self._latest_at
        latest = self._latest_at.get(answer)
        self._latest_at[answer] = now
        return is_first, None if latest is None else now - latest

    def emit(self, commit: Commit) -> None:
        """Hand one commit to the reader; the last has `finish` and completes the last answer."""
        if commit.finish is not None:
            self.unfinished.discard(commit.index)
        self.token_count += len(commit.tokens)
        self._hand(commit)

    def fail(self, error: PilotfishError) -> None:
        """End the stream with an error, after what was emitted before."""
        self._hand(error)

    def _hand(self, item: Commit | PilotfishError) -> None:
        """Wake the reader two turns of the event loop from now: by then the loop has sent its next step.

        The readers' work is then done while the target computes; before, the target would wait for all of them.
        """
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._queue.put_nowait, item)

    async def read(self) -> AsyncGenerator[Commit, None]:
        """The commits, in order, until every answer is complete; raises what `fail` was given."""
        left = self.course.answers
        while left:
            item = await self._queue.get()
            if isinstance(item, PilotfishError):
                raise item
            left -= item.finish is not None
            yield item
