"""The loop: admit, plan, propose, verify, commit, emit. Every effect of the control plane happens here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from cluster.coordinator.admit import Desk
from cluster.coordinator.clients.drafter_pool import Drafting
from cluster.coordinator.clients.target import TargetLink
from cluster.coordinator.isolate import Suspects
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.plan import Arranger
from cluster.coordinator.propose import Guessing
from cluster.coordinator.running import Lane
from cluster.coordinator.verify import build_rows, is_sound
from cluster.coordinator.wait import Rest
from cluster.core.config import Configuration
from cluster.core.errors import InvalidRequest, NotReady, TargetUnavailable
from cluster.core.ids import RequestId, SequenceId
from cluster.core.ports import Drafter, Target
from cluster.core.request import Commit, GenerationRequest
from cluster.core.scheduler import Plan
from cluster.core.verification import RowFaultCode, StepResult, TargetInfo, Verdict, VerifyRow

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long a lost target may be away before new requests are turned to other replicas."""
FAREWELL_SECONDS = 2.0
"""How long the last releases may take when stopping."""
RESTART_SECONDS = 1.0
"""How long a loop that died of a bug lies still."""


class Coordinator:
    """Answers requests with one target and its drafters. `start()` works, `stop()` ends; also a context manager."""

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter],
        configuration: Configuration,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        section = configuration.draft
        limits = configuration.scheduler
        self._metrics = metrics
        self._clock = clock
        self._rest = Rest()
        self._desk = Desk(limits, metrics, clock, self._rest.wake)
        self._roster = self._desk.roster
        self._link = TargetLink(target, configuration.target.step_timeout_seconds, self._rest.wake)
        drafting = Drafting(drafters, section, metrics, clock)
        self._guessing = Guessing(drafting, section, limits.max_sequences, metrics, clock)
        self._suspects = Suspects(self._desk.fail)
        self._arranger = Arranger(self._roster, self._link, self._suspects, metrics, limits, self._guessing.most)
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
        self._guessing.begin(self.info)
        self._metrics.begin(
            self.info.model,
            self.info.is_lossless,
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
            log.warning("%d requests were not complete after draining for %g s", len(self._roster), drain_seconds)
        self._is_alive = False
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._desk.fail_all(NotReady("the server is shutting down"))
        self._let_go()
        await asyncio.gather(self._guessing.close(FAREWELL_SECONDS), self._link.close(FAREWELL_SECONDS))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """The request's answers, commit by commit, each told by `Commit.index`; each ends with `finish`.

        Closing it frees what they hold within one step. Raises `NotReady`, `Overloaded`, `InvalidRequest` at the
        first step, `DeadlineExceeded` later.
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
        """End a live request's answers with `ABORT`; whether there was one."""
        return self._desk.abort(request_id)

    def conclude(self, request_id: RequestId, index: int = 0) -> bool:
        """The reader found the end of an answer by itself (a stop string): it is computed no further.

        Whether the answer was live; it counts as `STOP`. A last commit without tokens still ends it in the stream.
        """
        return self._desk.conclude(request_id, index)

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
                begun = self._clock()
                self._guessing.wish(self._roster.lanes())
                plan = await self._arranger.plan()
                if plan.rows:
                    await self._round(plan, begun)
                else:
                    await self._idle()
            except TargetUnavailable as error:
                await self._recover(error)

    async def _round(self, plan: Plan, begun: float) -> None:
        """Propose, verify, commit and emit."""
        plan, later = self._guessing.turn(plan)
        running = self._roster.running
        guesses = await self._guessing.gather(plan, running)
        rows = self._suspects.isolate(build_rows(plan, running, guesses.trees), running)
        if not rows:
            return
        proposed = self._clock()
        self._guessing.meanwhile(later, running)
        try:
            result = await self._link.step(rows)
        except TargetUnavailable:
            self._suspects.lost(running.get(row.sequence_id) for row in rows)
            raise
        stepped = self._clock() - proposed
        await self._take(rows, result)
        total = self._clock() - begun
        committed = sum(len(verdict.tokens) for verdict in result.verdicts)
        self._guessing.stepped(rows, guesses, total, committed)
        self._metrics.round(
            tokens=sum(row.width for row in rows),
            total=total,
            propose=guesses.waited if guesses.asked else None,
            step=stepped,
            target=result.step_seconds,
        )

    def _let_go(self) -> None:
        """Tell the workers, in the background, who has left. Between steps: a step must not revive what left."""
        leaving = self._roster.take_leaving()
        self._link.forget(lane.id for lane in leaving if lane.is_open)
        self._guessing.forget(lane.id for lane in leaving)

    async def _idle(self) -> None:
        """Nothing can be done now: sleep until something changes, or until blocks may have been freed."""
        if self._link.is_stale:
            await self._link.refresh()
        elif len(self._roster):
            await self._rest.pause()
            await self._link.refresh()
        elif not await self._rest.until_news(GRACE_SECONDS):
            await self._link.refresh()  # a target that died while nobody asked must be noticed too

    async def _take(self, rows: tuple[VerifyRow, ...], result: StepResult) -> None:
        """Commit and emit each verdict by itself; what is wrong with one row stays with its request."""
        verdicts = {verdict.sequence_id: verdict for verdict in result.verdicts}
        faults: dict[SequenceId, RowFaultCode] = {}
        for row in rows:
            lane = self._roster.running.get(row.sequence_id)
            if lane is None:
                continue  # it left while the target computed
            try:
                fault = self._commit(lane, row, verdicts.get(row.sequence_id))
            except Exception:
                log.exception("request %s failed", lane.stream.id)
                self._desk.fail(lane.stream, NotReady("the request failed for a reason of the server's own"))
                continue
            if fault is not None:
                faults[row.sequence_id] = fault
        if faults:
            await self._mend(faults)
        if len(faults) == len(rows):
            await self._rest.pause()
        else:
            self._rest.worked()

    def _commit(self, lane: Lane, row: VerifyRow, verdict: Verdict | None) -> RowFaultCode | None:
        """Take the target's word on one row; returns the fault that the loop must mend."""
        if verdict is None or not is_sound(row, verdict):
            log.error("the target's verdict on %s does not answer its row: it is asked again", row.sequence_id)
            return RowFaultCode.OUT_OF_SYNC
        if verdict.fault is not None and verdict.fault.code is RowFaultCode.INVALID:
            self._desk.fail(lane.stream, InvalidRequest("prompt", verdict.fault.message, "what the target can compute"))
            return None
        lane.losses = 0
        commit = lane.sequence.commit(verdict)
        if commit is not None:
            self._desk.take(lane, commit)
        return None if verdict.fault is None else verdict.fault.code

    async def _mend(self, faults: Mapping[SequenceId, RowFaultCode]) -> None:
        """Free what was lost, to send it anew; where blocks ran out, the latest arrival makes room."""
        lost = [sequence_id for sequence_id, code in faults.items() if code is RowFaultCode.OUT_OF_SYNC]
        if lost:
            await self._arranger.reopen(lost)
        if RowFaultCode.KV_EXHAUSTED in faults.values() and self._roster.running:
            latest = max(self._roster.running.values(), key=lambda lane: lane.sequence.arrival)
            await self._arranger.put_back((latest.id,))

    async def _recover(self, error: TargetUnavailable) -> None:
        """Wait for the target; whatever it may have held is released and will be opened anew."""
        log.warning("the target is lost, %d sequences wait for it: %s", len(self._roster.running), error)
        self._lost_at = self._clock()
        try:
            await self._rest.pause()
            await self._link.connect(self._arranger.held)
        finally:
            self._lost_at = None
        self._arranger.lost()
        self._guessing.begin(self.info)
        self._desk.fail_misfits(self.info)
