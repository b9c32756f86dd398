"""One thread for everything a worker computes: the event loop stays free, and state has one owner."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from cluster.core.errors import NotReady, PilotfishError
from cluster.core.verification import RowFault, RowFaultCode

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Row = TypeVar("Row")
Answer = TypeVar("Answer")


class ComputeThread:
    """Runs functions one after another. What has begun is finished, whoever still waits for it.

    While there are none it calls `in_between`, until that returns false or raises; then not before the next function
    has run.
    """

    def __init__(self, name: str, in_between: Callable[[], bool] | None = None) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._in_between = in_between
        self._lock = threading.Lock()
        self._unfinished = 0
        self._is_between = False
        self._closed = False
        self.failures = 0
        """Batches in a row that failed for no row's fault."""

    async def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """The function's result. If the caller is cancelled before it begins, it never does.

        Raises `NotReady` after `close`, and whatever the function raises.
        """
        future = self._submit(function, *arguments, **keywords)
        return await self._result(future, asyncio.wrap_future(future))

    async def run_surely(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """As `run`, but it happens even if the caller is cancelled: for what frees, and must not be lost."""
        future = self._submit(function, *arguments, **keywords)
        return await self._result(future, asyncio.shield(asyncio.wrap_future(future)))

    async def close(self, last: Callable[[], None]) -> None:
        """Finish what is under way, run `last`, end the thread. Closing again does nothing."""
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
        future = self._executor.submit(function, *arguments, **keywords)
        future.add_done_callback(self._finished)
        return future

    def _finished(self, _: Future[Result]) -> None:
        with self._lock:
            self._unfinished -= 1
        self._go_between()

    def _go_between(self) -> None:
        """Call `in_between` once everything before it has run, unless that is to happen already."""
        if self._in_between is None:
            return
        with self._lock:
            if self._closed or self._unfinished or self._is_between:
                return
            self._is_between = True
        try:
            self._executor.submit(self._work_in_between)
        except RuntimeError:  # closed meanwhile
            return

    def _work_in_between(self) -> None:
        goes_on = False
        if self._in_between is not None and not (self._unfinished or self._closed):
            try:
                goes_on = self._in_between()
            except Exception:
                logger.exception("what was done ahead has failed: nothing more is, until the next call")
        with self._lock:
            self._is_between = False
        if goes_on:
            self._go_between()

    async def _result(self, future: Future[Result], waiting: asyncio.Future[Result]) -> Result:
        try:
            return await waiting
        except asyncio.CancelledError:
            # Nobody else will hear of its failure.
            future.add_done_callback(_log_failure)
            raise


def _log_failure(future: Future[Result]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("what the caller no longer waited for has failed", exc_info=error)


def counted(thread: ComputeThread, compute: Callable[[], Result]) -> Result:
    """`compute()`, noting on its thread whether it failed."""
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
) -> tuple[Answer, ...]:
    """`compute(rows)`, one answer per row; should that fail, each row alone, so that the culprit faults alone.

    `compute` must leave its state consistent when it raises, and answer a repeated row as before. Raises
    what was raised when it is no row's fault: the project's own errors, and those that befall every row.
    """
    try:
        return tuple(compute(rows))
    except PilotfishError:
        raise
    except Exception:
        if len(rows) < 2:
            raise
        logger.exception("%d rows failed together; each is computed alone", len(rows))
        answers: list[Answer] = []
        faults = 0
        for row in rows:
            try:
                answers.extend(compute([row]))
            except PilotfishError:
                raise
            except Exception as error:
                logger.exception("a row failed alone: %r", type(row).__name__)
                faults += 1
                message = f"this row cannot be computed ({type(error).__name__})"
                answers.append(fault(row, RowFault(RowFaultCode.INVALID, message)))
        if faults == len(rows):
            raise
        return tuple(answers)
