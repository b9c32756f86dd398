"""The target as the loop sees it: bounded in time, its occupancy and its life (epoch) remembered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from cluster.coordinator.clients.circuit_breaker import backoff
from cluster.coordinator.clients.release_queue import LARGEST_BATCH, Releases
from cluster.core.errors import InvalidRequest, NotReady, PilotfishError, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.ports import Target
from cluster.core.verification import (
    OpenRow,
    RowFault,
    RowFaultCode,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)

log = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 10.0
"""For everything but a step."""

MOST_OPENED_TOKENS = 1 << 22
"""In one call: it stays far below what a message may weigh."""

Answer = TypeVar("Answer")


class TargetLink:
    """Every call ends in time: with its answer, or with `TargetUnavailable`."""

    def __init__(self, target: Target, step_timeout_seconds: float, on_released: Callable[[], None]) -> None:
        self._target = target
        self._step_timeout = step_timeout_seconds
        self._on_released = on_released
        self._releases = Releases(target.release, self._released)
        self._info: TargetInfo | None = None
        self.kv = KvOccupancy(0, 0)
        """As last reported."""
        self.is_stale = False
        """Whether blocks were freed since that report."""

    @property
    def info(self) -> TargetInfo:
        """What the target is. Raises `NotReady` before it was first reached."""
        if self._info is None:
            raise NotReady("the target has not been reached yet")
        return self._info

    async def take_over(self) -> None:
        """Connect for the first time; what an earlier coordinator left on the target is freed."""
        while True:
            await self.connect(lambda: ())
            try:
                await self._bounded(self._target.release_all(), CALL_TIMEOUT_SECONDS)
                await self.refresh()
            except TargetUnavailable as error:
                log.warning("the target was lost while it was taken over: %s", error)
            else:
                return

    async def connect(self, held: Callable[[], Sequence[SequenceId]]) -> None:
        """Return once the target answers, however long that takes; it holds none of the sequences `held` names."""
        attempt = 0
        while True:
            try:
                await self._release_now(held())
                self._learn(await self._bounded(self._target.info(), CALL_TIMEOUT_SECONDS))
            except TargetUnavailable as error:
                log.log(logging.WARNING if attempt == 0 else logging.DEBUG, "waiting for the target: %s", error)
                await asyncio.sleep(backoff(attempt))
                attempt += 1
            else:
                return

    async def open(self, rows: Sequence[OpenRow]) -> tuple[int, ...]:
        """How many leading tokens the target holds of each, always fewer than there are.

        A row that it refuses or answers with nonsense counts as not stored: what ails it, the step will tell.
        Raises `TargetUnavailable`.
        """
        lens: tuple[int, ...] = ()
        while len(lens) < len(rows):
            lens += await self._open(_batch(rows[len(lens) :]))
        return tuple(stored if stored < len(row.tokens) else 0 for row, stored in zip(rows, lens, strict=True))

    async def step(self, rows: tuple[VerifyRow, ...]) -> StepResult:
        """One forward pass. A row that makes the target refuse the whole batch is found out and faults alone.

        Raises `TargetUnavailable`.
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
            return StepResult(first.verdicts + second.verdicts, second.kv, first.step_seconds + second.step_seconds)
        self.kv, self.is_stale = result.kv, False
        return result

    async def evict(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free the blocks of sequences that will be sent anew, before they are. Raises `TargetUnavailable`."""
        await self._release_now(sequence_ids)
        await self.refresh()

    async def refresh(self) -> None:
        """Ask for the occupancy. Raises `TargetUnavailable`, also when the target has been born again."""
        self.is_stale = False
        info = await self._bounded(self._target.info(), CALL_TIMEOUT_SECONDS)
        if info.epoch != self.info.epoch:
            raise TargetUnavailable("it was restarted: what it stored is gone")
        self._learn(info)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences in the background. Never while a step that names them is under way."""
        self._releases.add(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """Send the last releases."""
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

    def _learn(self, info: TargetInfo) -> None:
        self._info, self.kv = info, info.kv

    def _released(self) -> None:
        self.is_stale = True
        self._on_released()

    async def _release_now(self, sequence_ids: Sequence[SequenceId]) -> None:
        for first in range(0, len(sequence_ids), LARGEST_BATCH):
            batch = sequence_ids[first : first + LARGEST_BATCH]
            await self._bounded(self._target.release(batch), CALL_TIMEOUT_SECONDS)

    async def _bounded(self, call: Awaitable[Answer], seconds: float, *, refusable: bool = False) -> Answer:
        """Every failure is `TargetUnavailable`, except that a `refusable` call may be refused with `InvalidRequest`."""
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
            log.exception("a call to the target failed in an unforeseen way")
            raise TargetUnavailable(repr(error)) from error


def _batch(rows: Sequence[OpenRow]) -> Sequence[OpenRow]:
    """As many of the first rows as one call may carry; at least one."""
    tokens = 0
    for index, row in enumerate(rows):
        tokens += len(row.tokens)
        if index and tokens > MOST_OPENED_TOKENS:
            return rows[:index]
    return rows
