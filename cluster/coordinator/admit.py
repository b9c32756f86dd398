"""Where requests come in and answers go out: refusals, deadlines, endings. Knows no worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from cluster.coordinator.beam_search import Beams
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.output_stream import Stream
from cluster.coordinator.registry import Roster
from cluster.coordinator.running import Lane
from cluster.coordinator.samples import Birth, Course, Samples
from cluster.core.config import SchedulerSection
from cluster.core.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded, PilotfishError
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import Commit, FinishReason, GenerationRequest
from cluster.core.scheduler import check_fits
from cluster.core.sequence import Sequence
from cluster.core.verification import TargetInfo

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
        self._births = 0
        self._mean_seconds = 1.0
        self._emptied = asyncio.Event()

    def enter(self, request: GenerationRequest, info: TargetInfo) -> Stream:
        """Queue a request. Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`."""
        self._check(request, info)
        course = _course(request, info)
        limits, places = self._limits, self.roster.places + course.places
        if places > limits.max_sequences + limits.max_waiting:
            place_seconds = self._mean_seconds / limits.max_sequences
            raise Overloaded(f"the queue of {limits.max_waiting} sequences is full", max(1.0, place_seconds))
        now = self._clock()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request came in")
        stream = Stream(request, course, self._arrivals, now)
        self._arrivals += course.places
        if request.deadline is not None:
            # A timer of its own: a deadline must pass even while the loop waits for a target that hangs.
            stream.expiry = asyncio.get_running_loop().call_later(request.deadline - now, self._expire, stream)
        self._emptied.clear()
        self.roster.enter(stream)
        self._bear(stream, course.begin())
        self._metrics.admitted(len(request.prompt))
        self._on_change()
        return stream

    def take(self, lane: Lane, commit: Commit) -> None:
        """The target's word on one sequence: let follow what follows, and hand out what is for the reader."""
        self._metrics.decided(commit)
        stream = lane.stream
        place = lane.sequence.arrival - stream.first_arrival
        turn = stream.course.take(place, commit)
        self._bear(stream, turn.births)
        if commit.finish is not None:
            self.roster.end(lane)
        for one in turn.commits:
            self._hand_out(stream, one)

    def conclude(self, request_id: RequestId, answer: int) -> bool:
        """The reader has found the end of an answer by itself; whether the answer was unfinished."""
        stream = self.roster.find(request_id)
        lane = None if stream is None else stream.writer(answer)
        if stream is None or lane is None or answer not in stream.unfinished or lane.expects_heirs:
            return False  # before its first token there is nothing to find the end of
        self.roster.end(lane)
        self._hand_out(stream, Commit((), 0, finish=FinishReason.STOP, usage=stream.usage(answer), index=answer))
        self._on_change()
        return True

    def abort(self, request_id: RequestId) -> bool:
        """End what is unfinished of a live request with `ABORT`; whether there was one."""
        stream = self.roster.find(request_id)
        if stream is None:
            return False
        for answer in sorted(stream.unfinished):
            self._hand_out(stream, Commit((), 0, finish=FinishReason.ABORT, usage=stream.usage(answer), index=answer))
        return True

    def leave(self, stream: Stream) -> None:
        """The reader reads no more; no harm when its answers were complete."""
        if self._close(stream):
            for _ in stream.unfinished:
                self._finished(stream, FinishReason.ABORT)

    def fail(self, stream: Stream, error: PilotfishError) -> None:
        """End a stream with an error."""
        if self._close(stream):
            stream.fail(error)
            self._metrics.failed(error)

    def fail_misfits(self, info: TargetInfo) -> None:
        """The target came back as another: end what it could never finish, lest it block the queue for ever."""
        for stream in self.roster:
            try:
                self._check_fits(stream.request, info)
            except InvalidRequest as error:
                self.fail(stream, NotReady(f"the target came back smaller than it was: {error}"))

    def fail_all(self, error: PilotfishError) -> None:
        """End every stream with an error."""
        for stream in self.roster:
            self.fail(stream, error)

    async def drained(self) -> None:
        """Return when no stream is live."""
        if len(self.roster):
            await self._emptied.wait()

    def _check(self, request: GenerationRequest, info: TargetInfo) -> None:
        """Refuse what could never be served. Raises `InvalidRequest`."""
        self._check_fits(request, info)
        most = self._limits.max_sequences
        width = 1 if request.beam is None else request.beam.width
        bound = f"between 1 and {most}: the server computes {most} sequences at a time"
        for field, value in (("n", request.n), ("beam.width", width)):
            if not 1 <= value <= most:
                raise InvalidRequest(field, value, bound)
        if request.beam is not None and request.n > width:
            raise InvalidRequest("n", request.n, f"at most the beam width of {width}")
        if self.roster.find(request.request_id) is not None:
            raise InvalidRequest("request_id", request.request_id, "unlike those of running requests")

    def _check_fits(self, request: GenerationRequest, info: TargetInfo) -> None:
        context = info.max_context_len
        pool_tokens = info.layout.longest(info.kv.blocks_total, self._limits.max_step_tokens, context)
        check_fits(len(request.prompt), request.stopping.max_tokens, context, pool_tokens)

    def _bear(self, stream: Stream, births: tuple[Birth, ...]) -> None:
        """New sequences of a stream begin to wait."""
        if not births:
            return
        elders = dict(stream.places)
        for lane in elders.values():
            lane.expects_heirs = False
        for birth in births:
            self._births += 1
            name = SequenceId(f"{self._name}-{self._births}")
            sequence = Sequence(name, birth.request, stream.first_arrival + birth.place)
            parent = None if birth.parent is None else elders[birth.parent]
            lane = stream.places[birth.place] = Lane(sequence, stream, birth.answer, parent, birth.expects_heirs)
            self.roster.wait(lane)

    def _hand_out(self, stream: Stream, commit: Commit) -> None:
        """A commit for the reader; the last one ends the stream."""
        now = self._clock()
        stream.emit(commit)
        if commit.tokens:
            is_first, since_latest = stream.mark(commit.index, now)
            since_arrival = now - stream.arrived_at if is_first else None
            self._metrics.emitted(len(commit.tokens), since_arrival, since_latest)
        if commit.finish is None:
            return
        self._finished(stream, commit.finish)
        if not stream.unfinished:
            self._close(stream)

    def _expire(self, stream: Stream) -> None:
        self.fail(stream, DeadlineExceeded(f"the deadline passed after {stream.token_count} tokens of the answer"))

    def _close(self, stream: Stream) -> bool:
        """Take the stream off the roster; whether it was live."""
        if not self.roster.remove(stream):
            return False
        if stream.expiry is not None:
            stream.expiry.cancel()
        if not len(self.roster):
            self._emptied.set()
        seconds = self._clock() - stream.arrived_at
        self._mean_seconds += _WEIGHT_OF_LATEST * (seconds - self._mean_seconds)
        self._on_change()
        return True

    def _finished(self, stream: Stream, reason: FinishReason) -> None:
        self._metrics.finished(reason.value, self._clock() - stream.arrived_at)


def _course(request: GenerationRequest, info: TargetInfo) -> Course:
    if request.beam is None:
        return Samples(request)
    return Beams(request, request.beam, info.vocabulary_size)
