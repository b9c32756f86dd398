"""The loop: admit, plan, propose, verify, commit, emit. Every effect of the control plane happens here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self

from cluster.coordinator.breaker import backoff
from cluster.coordinator.desk import Desk
from cluster.coordinator.drafting import Ask, Drafting
from cluster.coordinator.link import TargetLink
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.rows import build_rows, is_sound
from cluster.coordinator.stream import Stream
from cluster.core import scheduler
from cluster.core.config import Configuration
from cluster.core.errors import InvalidRequest, NotReady, TargetUnavailable
from cluster.core.ids import RequestId, SequenceId
from cluster.core.ports import Drafter, Target
from cluster.core.scheduler import NO_DRAFT, Plan, State
from cluster.core.sequence import LOST
from cluster.core.tree import TokenTree
from cluster.core.types import (
    Commit,
    DraftBudget,
    GenerationRequest,
    RowFaultCode,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long a lost target may be away before new requests are turned to other replicas."""
MOST_LOSSES = 8
"""Steps in a row that may be lost with a sequence in them before its request is given up."""
FAREWELL_SECONDS = 2.0
"""How long the last releases may take when stopping."""
RESTART_SECONDS = 1.0
"""How long a loop that died of a bug lies still."""


class Coordinator:
    """Answers requests with one target and one drafter. `start()` works, `stop()` ends; also a context manager."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        configuration: Configuration,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        section = configuration.draft
        self._limits = configuration.scheduler
        self._draft = NO_DRAFT if section.method == "none" else DraftBudget(section.max_nodes, section.max_depth)
        self._metrics = metrics
        self._clock = clock
        self._wake = asyncio.Event()
        self._desk = Desk(self._limits, metrics, clock, self._wake.set)
        self._roster = self._desk.roster
        self._link = TargetLink(target, configuration.target.step_timeout_seconds, self._wake.set)
        self._drafting = Drafting(drafter, section, metrics, clock)
        self._fruitless = 0
        self._is_alive = False
        self._is_draining = False
        self._lost_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0.0)

    @property
    def info(self) -> TargetInfo:
        """What the target is. Raises `NotReady` before `start()` is through."""
        return self._link.info

    @property
    def ready(self) -> bool:
        """Whether new requests are taken: not while starting, draining, or without a target for long."""
        is_away = self._lost_at is not None and self._clock() - self._lost_at >= GRACE_SECONDS
        return self._is_alive and not self._is_draining and not is_away

    async def start(self) -> None:
        """Wait for the target, however long that takes, then take requests."""
        await self._link.take_over()
        self._metrics.begin(
            self.info.model,
            running=lambda: len(self._roster.running),
            waiting=lambda: self._roster.waiting_count,
            kv_usage=lambda: 1 - self._link.kv.blocks_free / max(1, self._link.kv.blocks_total),
        )
        self._is_alive = True
        self._task = asyncio.create_task(self._supervise(), name="coordinator")

    async def stop(self, drain_seconds: float) -> None:
        """Take no new requests, let the accepted ones end within `drain_seconds`, then end the rest and stop."""
        self._is_draining = True
        if self._task is None:
            return
        try:
            async with asyncio.timeout(drain_seconds):
                await self._desk.drained()
        except TimeoutError:
            log.warning("%d answers were not complete after draining for %g s", len(self._roster), drain_seconds)
        self._is_alive = False
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._desk.fail_all(NotReady("the server is shutting down"))
        self._let_go()
        await asyncio.gather(self._drafting.close(FAREWELL_SECONDS), self._link.close(FAREWELL_SECONDS))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """One answer, commit by commit; closing it frees what it holds within one step.

        Raises `NotReady`, `Overloaded`, `InvalidRequest` at the first step, `DeadlineExceeded` later.
        """
        if not self.ready:
            raise NotReady("the server is starting, draining, or without a target")
        stream = self._desk.enter(request, self.info)
        try:
            async with aclosing(stream.read()) as commits:
                async for commit in commits:
                    yield commit
        finally:
            self._desk.leave(stream)

    def abort(self, request_id: RequestId) -> bool:
        """End a live request's stream with `ABORT`; whether there was one."""
        return self._desk.abort(request_id)

    # --- the loop -----------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep the loop alive: a bug in it ends the answers of the moment, loudly, and not the server."""
        while True:
            try:
                await self._run()
            except Exception:
                log.exception("the loop died of a bug: every answer is ended, and it starts again")
                self._is_alive = False
                self._metrics.loop_died()
                self._desk.fail_all(NotReady("the coordinator failed and starts again"))
                await asyncio.sleep(RESTART_SECONDS)
                self._is_alive = True

    async def _run(self) -> None:
        """Round after round. A lost target is waited for, and sent again what it held."""
        while True:
            try:
                self._let_go()
                plan = scheduler.plan(self._state())
                if plan.rows:
                    await self._round(plan)
                else:
                    await self._rest()
            except TargetUnavailable as error:
                await self._recover(error)

    async def _round(self, plan: Plan) -> None:
        """Admit, propose, verify, commit and emit."""
        begun = self._clock()
        await self._make_room(plan)
        trees = await self._propose(plan)
        proposed = self._clock()
        rows = self._one_suspect(build_rows(plan, self._roster.running, trees or {}))
        if not rows:
            return
        try:
            result = await self._link.step(rows)
        except TargetUnavailable:
            self._suspect(rows)
            raise
        stepped = self._clock() - proposed
        await self._take(rows, result)
        self._metrics.round(
            tokens=sum(row.width for row in rows),
            total=self._clock() - begun,
            propose=None if trees is None else proposed - begun,
            step=stepped,
            target=result.step_seconds,
        )

    def _let_go(self) -> None:
        """Tell the workers, in the background, who has left. Between steps: a step must not revive what left."""
        leaving = self._roster.take_leaving()
        self._link.forget(stream.sequence.id for stream in leaving if stream.touched)
        self._drafting.forget(stream.sequence.id for stream in leaving)

    def _state(self) -> State:
        """What the plan depends on, frozen."""
        return State(
            waiting=self._roster.waiting_views(self._limits.max_sequences),
            running=self._roster.running_views(),
            kv=self._link.kv,
            layout=self.info.layout,
            max_context_len=self.info.max_context_len,
            limits=self._limits,
            draft=self._draft,
        )

    async def _rest(self) -> None:
        """Nothing can be done now: sleep until something changes, or until blocks may have been freed."""
        if self._link.is_stale:
            await self._link.refresh()
        elif len(self._roster):
            await self._pause()
            await self._link.refresh()
        else:
            try:
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                await self._link.refresh()  # a target that died while nobody asked must be noticed too
                return
            self._wake.clear()

    async def _pause(self) -> None:
        """It came to nothing this time: do not spin, but wake when something changes."""
        seconds = backoff(self._fruitless, first=0.005, longest=1.0)
        self._fruitless += 1
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _make_room(self, plan: Plan) -> None:
        """Preempt, then admit."""
        if plan.preempt:
            await self._put_back(plan.preempt)
        for sequence_id in plan.admit:
            self._roster.admit(sequence_id)

    async def _put_back(self, sequence_ids: tuple[SequenceId, ...]) -> None:
        """Preempt running sequences: their blocks go to others, and they are replayed later."""
        for sequence_id in sequence_ids:
            self._lose(self._roster.put_back(sequence_id))
        self._metrics.preempted(len(sequence_ids))
        await self._link.evict(sequence_ids)

    async def _propose(self, plan: Plan) -> Mapping[SequenceId, TokenTree] | None:
        """Trees for the rows that decide and have room for one; `None` when there are no such rows."""
        asks = [
            Ask(stream.sequence, row.draft)
            for row in plan.rows
            if row.decide and row.draft.max_nodes and (stream := self._roster.running.get(row.sequence_id))
        ]
        return await self._drafting.propose(asks, self.info.vocabulary_size) if asks else None

    async def _take(self, rows: tuple[VerifyRow, ...], result: StepResult) -> None:
        """Commit and emit each verdict by itself; what is wrong with one row stays with its request."""
        verdicts = {verdict.sequence_id: verdict for verdict in result.verdicts}
        faults: dict[SequenceId, RowFaultCode] = {}
        for row in rows:
            stream = self._roster.running.get(row.sequence_id)
            if stream is None:
                continue  # it left while the target computed
            try:
                fault = self._commit(stream, row, verdicts.get(row.sequence_id))
            except Exception:
                log.exception("request %s failed", stream.sequence.request.request_id)
                self._desk.fail(stream, NotReady("the request failed for a reason of the server's own"))
                continue
            if fault is not None:
                faults[row.sequence_id] = fault
        if faults:
            await self._mend(faults)
        if len(faults) == len(rows):
            await self._pause()
        else:
            self._fruitless = 0

    def _commit(self, stream: Stream, row: VerifyRow, verdict: Verdict | None) -> RowFaultCode | None:
        """Take the target's word on one row; returns the fault that the loop must mend."""
        if verdict is None or not is_sound(row, verdict):
            log.error("the target's verdict on %s does not answer its row: it is asked again", row.sequence_id)
            return RowFaultCode.OUT_OF_SYNC
        if verdict.fault is not None and verdict.fault.code is RowFaultCode.INVALID:
            self._desk.fail(stream, InvalidRequest("prompt", verdict.fault.message, "what the target can compute"))
            return None
        stream.losses = 0
        commit = stream.sequence.commit(verdict)
        if commit is not None:
            self._desk.emit(stream, commit)
        return None if verdict.fault is None else verdict.fault.code

    async def _mend(self, faults: Mapping[SequenceId, RowFaultCode]) -> None:
        """Free what was lost, to send it anew; where blocks ran out, the latest arrival makes room."""
        lost = [sequence_id for sequence_id, code in faults.items() if code is RowFaultCode.OUT_OF_SYNC]
        for sequence_id in lost:
            self._lose(self._roster.running[sequence_id])
        self._metrics.replayed(len(lost))
        if lost:
            await self._link.evict(lost)
        if RowFaultCode.KV_EXHAUSTED in faults.values() and self._roster.running:
            latest = max(self._roster.running.values(), key=lambda stream: stream.sequence.arrival)
            await self._put_back((latest.sequence.id,))

    async def _recover(self, error: TargetUnavailable) -> None:
        """Wait for the target; whatever it may have held is released and will be sent anew."""
        log.warning("the target is lost, %d sequences wait for it: %s", len(self._roster.running), error)
        self._lost_at = self._clock()
        try:
            await self._pause()
            await self._link.connect(lambda: [stream.sequence.id for stream in self._roster if stream.touched])
        finally:
            self._lost_at = None
        for stream in self._roster.running.values():
            self._lose(stream)
        self._metrics.replayed(len(self._roster.running))

    def _one_suspect(self, rows: tuple[VerifyRow, ...]) -> tuple[VerifyRow, ...]:
        """While steps are being lost, one suspected sequence at a time: whoever is innocent then gets its verdict."""
        suspects = [row for row in rows if self._roster.running[row.sequence_id].losses >= MOST_LOSSES // 2]
        return tuple(suspects[:1]) or rows

    def _suspect(self, rows: tuple[VerifyRow, ...]) -> None:
        """A step was lost. A request that is there every time must not take the target from all others for ever."""
        for row in rows:
            stream = self._roster.running.get(row.sequence_id)
            if stream is None:
                continue
            stream.losses += 1
            if stream.losses >= MOST_LOSSES:
                log.error("request %s: %d steps in a row were lost with it", row.sequence_id, MOST_LOSSES)
                self._desk.fail(stream, NotReady(f"the target was lost {MOST_LOSSES} times in a row on this request"))

    @staticmethod
    def _lose(stream: Stream) -> None:
        """The target holds nothing of it any more."""
        stream.sequence.commit(Verdict(stream.sequence.id, len(stream.sequence), fault=LOST))
