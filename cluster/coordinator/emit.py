"""Emit: hand commits to the readers, and end requests. Every request ends exactly once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from cluster.coordinator.instruments import Instruments
from cluster.coordinator.requests.delivery import EmittedTokens, call_during_step
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.errors import PilotfishError, WorkerUnavailable
from cluster.core.ids import RequestId
from cluster.core.request import Commit, FinishReason

log = logging.getLogger(__name__)

_LATEST_WEIGHT = 0.1
"""Weight of the latest request in the running mean of how long requests take."""


class Emitter:
    """Hands commits to readers. A request ends when it finishes, fails or is aborted, or when its reader leaves."""

    def __init__(self, table: RequestTable, instruments: Instruments, on_change: Callable[[], None]) -> None:
        self._table = table
        self._metrics = instruments.metrics
        self._clock = instruments.clock
        self._tracer = instruments.tracer
        self._on_change = on_change
        self.mean_request_seconds = 1.0
        """Running mean of the time from arrival to end, in seconds."""

    def emit(self, commits: Iterable[tuple[LiveRequest, Commit]]) -> None:
        """Hand commits to their readers. A failure ends only its own request."""
        now = self._clock()
        emitted: list[EmittedTokens] = []
        for request, commit in commits:
            if self._table.find(request.id) is not request:
                continue  # the request failed in this round
            try:
                tokens = self._emit(request, commit, now)
                if tokens is not None:
                    emitted.append(tokens)
            except Exception:
                log.exception("request %s failed", request.id)
                self.fail(request, WorkerUnavailable("the request failed because of an internal error"))
        call_during_step(self._metrics.emitted, emitted)

    def conclude(self, request_id: RequestId, answer: int) -> bool:
        """End an answer as `STOP` because its reader found a stop string. Returns whether it was unfinished."""
        request = self._table.find(request_id)
        live = None if request is None else request.writer(answer)
        if request is None or live is None or answer not in request.unfinished or live.may_fork:
            return False  # the answer has no token yet, so the reader cannot have found a stop string
        self._table.finish(live)
        self._emit(request, _last_commit(request, answer, FinishReason.STOP), self._clock())
        self._on_change()
        return True

    def abort(self, request_id: RequestId) -> bool:
        """End the unfinished answers of a live request as `ABORT`. Returns whether the request was live."""
        request = self._table.find(request_id)
        if request is None:
            return False
        for answer in request.unfinished:
            self._emit(request, _last_commit(request, answer, FinishReason.ABORT), self._clock())
        return True

    def disconnect(self, request: LiveRequest) -> None:
        """End a request whose reader has left. Unfinished answers count as aborted."""
        if self._close(request):
            for answer in request.unfinished:
                self._metrics.finished(FinishReason.ABORT, request.usage(answer), request.timing(self._clock()))

    def fail(self, request: LiveRequest, error: PilotfishError) -> None:
        """End a request with an error."""
        if self._close(request, error):
            request.fail(error)
            self._metrics.failed(error)

    def fail_all(self, error: PilotfishError) -> None:
        """End every live request with an error."""
        for request in self._table:
            self.fail(request, error)

    def _emit(self, request: LiveRequest, commit: Commit, now: float) -> EmittedTokens | None:
        """Hand one commit to its reader. Returns the times of its tokens, if it has any."""
        emitted = request.emit(commit, now)
        if commit.finish is None:
            return emitted
        self._metrics.finished(commit.finish, commit.usage or request.usage(commit.index), request.timing(now))
        if not request.unfinished:
            self._metrics.completed(request.longest_answer)
            self._close(request)
        return emitted

    def _close(self, request: LiveRequest, error: PilotfishError | None = None) -> bool:
        """Remove a request from the table. Returns whether it was live."""
        if not self._table.remove(request):
            return False
        now = self._clock()
        self._tracer.end(request, now, error)
        seconds = now - request.arrived_at
        self.mean_request_seconds += _LATEST_WEIGHT * (seconds - self.mean_request_seconds)
        self._on_change()
        return True


def _last_commit(request: LiveRequest, answer: int, reason: FinishReason) -> Commit:
    return Commit((), 0, finish=reason, usage=request.usage(answer), index=answer)
