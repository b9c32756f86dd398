"""One thread for everything that a worker computes: the event loop stays free, and one thread owns the state."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import NotReady, PilotfishError

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Row = TypeVar("Row")


class RowAnswer(Protocol):
    """The answer to one row."""

    @property
    def fault(self) -> RowFault | None:
        """Why the row was not computed."""


Answer = TypeVar("Answer", bound=RowAnswer)


class ComputeThread:
    """Runs functions one after another. A function that has begun is finished, even if its caller is cancelled.

    While no function waits it calls `idle_work`, until that returns false or raises. Then it calls `idle_work` again
    only after the next function has run.
    """

    def __init__(
        self, name: str, idle_work: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._begun_at: float | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._idle_work = idle_work
        self._lock = threading.Lock()
        self._unfinished = 0
        self._idle_work_scheduled = False
        self._closed = False
        self.failures = 0
        """Consecutive batches that failed although no single row was the cause."""

    @property
    def busy_seconds(self) -> float:
        """How long the function under way, or the piece of idle work, has been running, in seconds; 0 between them."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else self._clock() - begun_at

    async def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """Run the function and return its result. If the caller is cancelled before it begins, it is not run.

        Raises `NotReady` after `close`, and the errors of the function.
        """
        future = self._submit(function, *arguments, **keywords)
        return await self._result(future, asyncio.wrap_future(future))

    async def run_shielded(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """Run the function even if the caller is cancelled. Releases need this: none may be lost."""
        future = self._submit(function, *arguments, **keywords)
        return await self._result(future, asyncio.shield(asyncio.wrap_future(future)))

    async def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Finish the submitted functions, run `last` in the thread, end the thread. Closing again does nothing."""
        if self._closed:
            return
        future = self._submit(last)
        self._closed = True
        try:
            await self._result(future, asyncio.shield(asyncio.wrap_future(future)))
        finally:
            await asyncio.to_thread(self._executor.shutdown)

    def _submit(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Future[Result]:
        if self._closed:
            raise NotReady("this worker is closing")
        with self._lock:
            self._unfinished += 1
        future = self._executor.submit(self._timed, partial(function, *arguments, **keywords))
        future.add_done_callback(self._finished)
        return future

    def _timed(self, function: Callable[[], Result]) -> Result:
        self._begun_at = self._clock()
        try:
            return function()
        finally:
            self._begun_at = None

    def _finished(self, _: Future[Result]) -> None:
        with self._lock:
            self._unfinished -= 1
        self._schedule_idle_work()

    def _schedule_idle_work(self) -> None:
        """Run idle work after the functions that wait now, unless that is scheduled already."""
        if self._idle_work is None:
            return
        with self._lock:
            if self._closed or self._unfinished or self._idle_work_scheduled:
                return
            self._idle_work_scheduled = True
        try:
            self._executor.submit(self._timed, self._run_idle_work)
        except RuntimeError:  # closed in the meantime
            return

    def _run_idle_work(self) -> None:
        has_more = False
        if self._idle_work is not None and not (self._unfinished or self._closed):
            try:
                has_more = self._idle_work()
            except Exception:
                logger.exception("idle work has failed; it stops until the next call")
        with self._lock:
            self._idle_work_scheduled = False
        if has_more:
            self._schedule_idle_work()

    async def _result(self, future: Future[Result], waiting: asyncio.Future[Result]) -> Result:
        try:
            return await waiting
        except asyncio.CancelledError:
            # The caller is gone: log a failure instead.
            future.add_done_callback(_log_failure)
            raise


def _log_failure(future: Future[Result]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a function whose caller was cancelled has failed", exc_info=error)


def count_failures(thread: ComputeThread, compute: Callable[[], Result]) -> Result:
    """Run `compute` and count consecutive failures in `thread.failures`."""
    try:
        result = compute()
    except Exception:
        thread.failures += 1
        raise
    thread.failures = 0
    return result


def compute_rows(
    rows: Sequence[Row],
    compute: Callable[[Sequence[Row]], Sequence[Answer]],
    fault: Callable[[Row, RowFault], Answer],
    without_draft: Callable[[Row], Row | None] = lambda _: None,
) -> tuple[Answer, ...]:
    """Return `compute(rows)`, one answer per row. If it fails, compute each row alone, so that only bad rows fault.

    A row that fails alone too is computed as `without_draft(row)`, because no draft may cost an answer; `None`: it has
    no draft. `compute` must leave its state consistent when it raises, and answer a repeated row as before. Raises what
    `compute` raised if no single row is the cause: the project's own errors, errors that every row has, and errors of
    several rows where it has computed none. An answer with a fault may be one that nothing was computed for.
    """
    try:
        return tuple(compute(rows))
    except PilotfishError:
        raise
    except Exception:
        if len(rows) < 2 and (not rows or without_draft(rows[0]) is None):
            raise
        logger.exception("a batch of %d rows failed; each row is computed alone", len(rows))
        answers: list[Answer] = []
        failed, computed = 0, 0
        for row in rows:
            found = _compute_alone(row, compute, without_draft(row))
            if isinstance(found, Exception):
                failed += 1
                message = f"this row cannot be computed ({type(found).__name__})"
                answers.append(fault(row, RowFault(RowFaultCode.INVALID, message)))
            else:
                answers.extend(found)
                computed += sum(answer.fault is None for answer in found)
        if failed == len(rows) or (failed > 1 and not computed):
            raise
        return tuple(answers)


def _compute_alone(
    row: Row, compute: Callable[[Sequence[Row]], Sequence[Answer]], without_draft: Row | None
) -> Sequence[Answer] | Exception:
    """The answer to one row, with or without its draft, or the error of both. Raises the project's own errors."""
    try:
        return compute([row])
    except PilotfishError:
        raise
    except Exception as error:
        logger.exception("a single row failed: %r", type(row).__name__)
        return error if without_draft is None else _compute_alone(without_draft, compute, None)
