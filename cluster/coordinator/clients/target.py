"""The client of the target: gives every call a timeout, and stores the target's block counts and epoch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from cluster.coordinator.clients.circuit_breaker import backoff
from cluster.coordinator.clients.release_queue import MAX_BATCH, ReleaseQueue
from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import InvalidRequest, NotReady, PilotfishError, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.ports import Target
from cluster.core.verification import OpenRow, StepBatch, StepResult, TargetInfo, Verdict, VerifyRow

log = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 10.0
"""Timeout of every call except steps and openings, in seconds."""
LONGEST_RETRY_SECONDS = 0.5
"""Longest pause between attempts to reach a lost target, in seconds: all streams wait for it."""
MAX_OPENED_TOKENS = 1 << 22
"""Most tokens in one call that opens sequences: far below the bound of a message."""

Result = TypeVar("Result")


class TargetClient:
    """Calls the target. Every call ends within its timeout, with its result or with `TargetUnavailable`."""

    def __init__(
        self,
        target: Target,
        step_timeout_seconds: float,
        on_released: Callable[[], None],
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._on_call = on_call
        self._step_timeout = step_timeout_seconds
        self._on_released = on_released
        self._releases = ReleaseQueue(target.release, self._released)
        self._info: TargetInfo | None = None
        self.kv = KvOccupancy(0, 0)
        """The block counts that the target reported last."""
        self.is_stale = False
        """Whether blocks were freed since `kv` was reported."""

    @property
    def info(self) -> TargetInfo:
        """The description of the target. Raises `NotReady` before the first connection."""
        if self._info is None:
            raise NotReady("the target has not been reached yet")
        return self._info

    async def take_over(self) -> None:
        """Connect for the first time, and free the sequences that this coordinator has on the target, if any."""
        while True:
            await self.connect(lambda: ())
            try:
                await self._bounded(self._target.release_all(), CALL_TIMEOUT_SECONDS)
                await self.refresh()
            except TargetUnavailable as error:
                log.warning("the target was lost during the first connection: %s", error)
            else:
                return

    async def connect(self, open_ids: Callable[[], Sequence[SequenceId]]) -> None:
        """Return once the target answers and has released the sequences that `open_ids` returns."""
        attempt = 0
        while True:
            try:
                await self._release_now(open_ids())
                self._update(await self._bounded(self._target.info(), CALL_TIMEOUT_SECONDS))
            except TargetUnavailable as error:
                log.log(logging.WARNING if attempt == 0 else logging.DEBUG, "waiting for the target: %s", error)
                await asyncio.sleep(backoff(attempt, longest=LONGEST_RETRY_SECONDS))
                attempt += 1
            else:
                return

    async def open(self, rows: Sequence[OpenRow]) -> tuple[int, ...]:
        """Open sequences. Returns how many leading tokens of each the target holds, always fewer than the sequence has.

        A row that the target refuses or answers wrongly counts as not stored: the step will report its fault. Raises
        `TargetUnavailable`.
        """
        lens: tuple[int, ...] = ()
        while len(lens) < len(rows):
            lens += await self._open(_batch(rows[len(lens) :]))
        return tuple(stored if stored < len(row.tokens) else 0 for row, stored in zip(rows, lens, strict=True))

    async def step(self, rows: tuple[VerifyRow, ...]) -> StepResult:
        """Compute one forward pass. Raises `TargetUnavailable`.

        When a row makes the target refuse the whole batch, the batch is halved until that row faults alone.
        """
        try:
            result = await self._bounded(self._target.step(StepBatch(rows)), self._step_timeout, refusable=True)
        except InvalidRequest as error:
            if len(rows) == 1:
                row = rows[0]
                fault = RowFault(RowFaultCode.INVALID, str(error))
                return StepResult((Verdict(row.sequence_id, row.base_len, fault=fault),), self.kv)
            half = len(rows) // 2
            first, second = await self.step(rows[:half]), await self.step(rows[half:])
            return StepResult.of_parts((first, second), first.verdicts + second.verdicts)
        self.kv, self.is_stale = result.kv, False
        return result

    async def evict(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free the blocks of sequences now, before they are sent again. Raises `TargetUnavailable`."""
        await self._release_now(sequence_ids)
        await self.refresh()

    async def refresh(self) -> None:
        """Update the block counts. Raises `TargetUnavailable`, also when the target has been restarted."""
        self.is_stale = False
        info = await self._bounded(self._target.info(), CALL_TIMEOUT_SECONDS)
        if info.epoch != self.info.epoch:
            raise TargetUnavailable("the target was restarted and has lost all sequences")
        self._update(info)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences in the background. No step with them may be under way."""
        self._releases.add(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """Send the queued releases."""
        await self._releases.close(timeout_seconds)

    async def _open(self, rows: Sequence[OpenRow]) -> tuple[int, ...]:
        try:
            result = await self._bounded(self._target.open(rows), self._step_timeout, refusable=True)
        except InvalidRequest as error:
            if len(rows) == 1:
                log.warning("the target refuses to open %s: %s", rows[0].sequence_id, error)
                return (0,)
            half = len(rows) // 2
            return await self._open(rows[:half]) + await self._open(rows[half:])
        self.kv, self.is_stale = result.kv, False
        return result.stored_lens if len(result.stored_lens) == len(rows) else (0,) * len(rows)

    def _update(self, info: TargetInfo) -> None:
        self._info, self.kv = info, info.kv

    def _released(self) -> None:
        self.is_stale = True
        self._on_released()

    async def _release_now(self, sequence_ids: Sequence[SequenceId]) -> None:
        for first in range(0, len(sequence_ids), MAX_BATCH):
            batch = sequence_ids[first : first + MAX_BATCH]
            await self._bounded(self._target.release(batch), CALL_TIMEOUT_SECONDS)

    async def _bounded(self, call: Awaitable[Result], seconds: float, *, refusable: bool = False) -> Result:
        """Turn every failure into `TargetUnavailable`; a `refusable` call may also raise `InvalidRequest`."""
        self._on_call()
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TargetUnavailable:
            raise
        except InvalidRequest as error:
            if refusable:
                raise
            raise TargetUnavailable(str(error)) from error
        except TimeoutError as error:
            raise TargetUnavailable(f"no answer within {seconds:g} s") from error
        except PilotfishError as error:
            raise TargetUnavailable(str(error)) from error
        except Exception as error:
            log.exception("a call to the target failed unexpectedly")
            raise TargetUnavailable(repr(error)) from error


def _batch(rows: Sequence[OpenRow]) -> Sequence[OpenRow]:
    """Return as many of the first rows as one call may have, at least one."""
    tokens = 0
    for index, row in enumerate(rows):
        tokens += len(row.tokens)
        if index and tokens > MAX_OPENED_TOKENS:
            return rows[:index]
    return rows
