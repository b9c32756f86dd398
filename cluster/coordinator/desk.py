"""Where requests come in and answers go out: refusals, deadlines, endings. Knows no worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from cluster.coordinator.metrics import Metrics
from cluster.coordinator.roster import Roster
from cluster.coordinator.stream import Stream
from cluster.core.config import SchedulerSection
from cluster.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PilotfishError
from cluster.core.ids import RequestId, SequenceId
from cluster.core.scheduler import check_fits
from cluster.core.sequence import Sequence
from cluster.core.types import Commit, FinishReason, GenerationRequest, TargetInfo

_WEIGHT_OF_LATEST = 0.1
"""Of the newest ending in the running mean of how long requests take."""


class Desk:
    """Every stream that enters leaves exactly once: finished, failed, expired or left by its reader."""

    def __init__(
        self, limits: SchedulerSection, metrics: Metrics, clock: Callable[[], float], on_change: Callable[[], None]
    ) -> None:
        self.roster = Roster()
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._name = secrets.token_hex(6)  # two coordinators of one target must not share a sequence's name
        self._arrivals = 0
        self._mean_seconds = 1.0
        self._emptied = asyncio.Event()

    def enter(self, request: GenerationRequest, info: TargetInfo) -> Stream:
        """Queue a request. Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`."""
        context = info.max_context_len
        pool_tokens = info.layout.longest(info.kv.blocks_total, self._limits.max_step_tokens, context)
        check_fits(len(request.prompt), request.stopping.max_tokens, context, pool_tokens)
        if self.roster.find(request.request_id) is not None:
            raise InvalidRequest("request_id", request.request_id, "unlike those of running requests")
        if len(self.roster) >= self._limits.max_sequences + self._limits.max_waiting:
            place_seconds = self._mean_seconds / self._limits.max_sequences
            raise Overloaded(f"the queue of {self._limits.max_waiting} requests is full", max(1.0, place_seconds))
        now = self._clock()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request came in")
        self._arrivals += 1
        stream = Stream(Sequence(SequenceId(f"{self._name}-{self._arrivals}"), request, self._arrivals), now)
        if request.deadline is not None:
            # A timer of its own: a deadline must pass even while the loop waits for a target that hangs.
            stream.expiry = asyncio.get_running_loop().call_later(request.deadline - now, self._expire, stream)
        self._emptied.clear()
        self.roster.enter(stream)
        self._metrics.admitted(len(request.prompt))
        self._on_change()
        return stream

    def emit(self, stream: Stream, commit: Commit) -> None:
        """Hand a commit to the stream's reader; the last one ends it."""
        now = self._clock()
        stream.emit(commit)
        if commit.tokens:
            latest = None if stream.latest_at is None else now - stream.latest_at
            self._metrics.committed(commit, now - stream.arrived_at, latest)
            stream.latest_at = now
        if commit.finish is not None and self._close(stream):
            self._finished(stream, commit.finish)

    def fail(self, stream: Stream, error: PilotfishError) -> None:
        """End a stream with an error."""
        if self._close(stream):
            stream.fail(error)
            self._metrics.failed(error)

    def fail_all(self, error: PilotfishError) -> None:
        """End every stream with an error."""
        for stream in self.roster:
            self.fail(stream, error)

    def leave(self, stream: Stream) -> None:
        """The reader reads no more; no harm when the answer was over."""
        if self._close(stream):
            self._finished(stream, FinishReason.ABORT)

    def abort(self, request_id: RequestId) -> bool:
        """End a live request's stream with `ABORT`; whether there was one."""
        stream = self.roster.find(request_id)
        if stream is None:
            return False
        self.emit(stream, Commit((), 0, finish=FinishReason.ABORT, usage=stream.sequence.usage()))
        return True

    async def drained(self) -> None:
        """Return when no stream is live."""
        if len(self.roster):
            await self._emptied.wait()

    def _expire(self, stream: Stream) -> None:
        done = len(stream.sequence) - stream.sequence.prompt_len
        self.fail(stream, DeadlineExceeded(f"the deadline passed after {done} tokens of the answer"))

    def _close(self, stream: Stream) -> bool:
        """Take the stream off the roster; whether it was live."""
        if not self.roster.remove(stream):
            return False
        if stream.expiry is not None:
            stream.expiry.cancel()
        if not len(self.roster):
            self._emptied.set()
        self._on_change()
        return True

    def _finished(self, stream: Stream, reason: FinishReason) -> None:
        seconds = self._clock() - stream.arrived_at
        self._mean_seconds += _WEIGHT_OF_LATEST * (seconds - self._mean_seconds)
        self._metrics.finished(reason.value, seconds)
