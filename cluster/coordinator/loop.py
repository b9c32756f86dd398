"""The loop of the coordinator. Each round plans, proposes, verifies, commits and emits."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from cluster.coordinator.admit import AdmissionController
from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.commit import CommitResult, Committer
from cluster.coordinator.emit import Emitter
from cluster.coordinator.instruments import Instruments
from cluster.coordinator.plan import Planner
from cluster.coordinator.propose import Proposer
from cluster.coordinator.requests.delivery import call_during_step
from cluster.coordinator.requests.request_table import RequestTable
from cluster.coordinator.verify import Verifier
from cluster.coordinator.wakeup import LoopProgress, Wakeup
from cluster.core.errors import NotReady, TargetUnavailable
from cluster.core.scheduling.state import Plan
from cluster.core.verification import VerifyRow
from cluster.speculation.observation import RoundRecord, RoundTimes

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Seconds for which a target may be lost before new requests are refused, and between checks of an idle target."""
RESTART_SECONDS = 1.0
"""Pause before the loop starts again after a bug, in seconds."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What a request passes, in order. Admission happens when it arrives, everything else in each round."""

    admission: AdmissionController
    planner: Planner
    proposer: Proposer
    verifier: Verifier
    committer: Committer
    emitter: Emitter


class Loop:
    """Serves the requests of the table between `start()` and `stop()`."""

    def __init__(
        self,
        stages: Stages,
        table: RequestTable,
        target: TargetClient,
        wakeup: Wakeup,
        progress: LoopProgress,
        instruments: Instruments,
    ) -> None:
        self._admission = stages.admission
        self._planner = stages.planner
        self._proposer = stages.proposer
        self._verifier = stages.verifier
        self._committer = stages.committer
        self._emitter = stages.emitter
        self._table = table
        self._target = target
        self._wakeup = wakeup
        self._progress = progress
        self._metrics = instruments.metrics
        self._clock = instruments.clock
        self._tracer = instruments.tracer
        self._is_running = False
        self._is_stopped = False
        self._target_lost_at: float | None = None
        self._advanced_at = instruments.clock()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """Whether `start()` was called."""
        return self._task is not None

    @property
    def is_serving(self) -> bool:
        """Whether the loop runs and its target is reachable, or was lost less than `GRACE_SECONDS` ago."""
        lost_at = self._target_lost_at
        return self._is_running and (lost_at is None or self._clock() - lost_at < GRACE_SECONDS)

    @property
    def stalled_seconds(self) -> float:
        """How long no step has ended although there are requests, in seconds."""
        return self._clock() - self._advanced_at if len(self._table) else 0.0

    def check_health(self) -> None:
        """Raise `NotReady` if the loop hangs or has ended unexpectedly. Only a new process can help."""
        task = self._task
        if task is None or self._is_stopped:
            return
        if task.done():
            reason = "it was cancelled" if task.cancelled() else repr(task.exception())
            raise NotReady(f"the loop has ended: {reason}")
        if seconds := self._progress.hung_seconds:
            raise NotReady(f"the loop has waited for {seconds:.0f} s, longer than any wait may last")

    def start(self) -> None:
        """Start the task that serves requests."""
        self._is_running = True
        self._progress.mark()
        self._task = asyncio.create_task(self._supervise(), name="coordinator")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel the task that serves requests."""
        self._is_running, self._is_stopped = False, True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def release_ended(self) -> None:
        """Release ended sequences on the workers. Call it only between steps: a step would create them again."""
        released = self._table.take_released()
        self._target.release(live.id for live in released if live.is_open)
        self._proposer.release(live.id for live in released)

    async def _supervise(self) -> None:
        """Run the loop. After a bug in it, log an error, end the live requests and restart the loop."""
        while True:
            try:
                await self._run()
            except Exception:
                log.exception("the loop failed because of a bug: all requests are ended and the loop restarts")
                self._is_running = False
                self._metrics.loop_died()
                self._emitter.fail_all(NotReady("the coordinator failed and restarts"))
                await asyncio.sleep(RESTART_SECONDS)
                self._is_running = True

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log an end that `stop` has not caused: nothing serves requests any more."""
        if not self._is_stopped:
            self._is_running = False
            log.critical("the loop has ended", exc_info=None if task.cancelled() else task.exception())

    async def _run(self) -> None:
        while True:
            self._progress.mark()
            try:
                self.release_ended()
                begun = self._clock()
                wanted = self._proposer.size_trees(self._planner.candidates())
                plan = await self._planner.plan(wanted)
                if plan.rows:
                    await self._round(plan, begun)
                else:
                    await self._idle()
                self._advanced_at = self._clock()
            except TargetUnavailable as error:
                await self._recover(error)

    async def _round(self, plan: Plan, begun: float) -> None:
        """Propose, verify, commit and emit one plan."""
        clock = self._clock
        plan, later = self._proposer.split(plan)
        proposing = clock()
        drafts = await self._proposer.propose(plan, later)
        rows = self._verifier.rows(plan, drafts)
        if not rows:
            return
        verifying = clock()
        self._proposer.work_during_step(later)
        step = await self._verifier.verify(rows)
        committing = clock()
        drafting = self._proposer.receive(rows, step, drafts)
        self._tracer.round_decided(
            live.request_id for row in rows if (live := self._table.running.get(row.sequence_id)) is not None
        )
        result = self._committer.commit(rows, step)
        self._emitter.emit(result.commits)
        times = RoundTimes(begun, proposing, verifying, committing, clock())
        self._observe(RoundRecord(rows, step, drafts, drafting, times), result)
        await self._repair(rows, result)

    def _observe(self, record: RoundRecord, result: CommitResult) -> None:
        """Show a round to the tracer, to the controller and, while the next step is computed, to the metrics."""
        self._tracer.round_ended(record)
        self._proposer.observe(record)
        call_during_step(self._metrics.decided, result.decided)
        call_during_step(self._metrics.round, record)

    async def _repair(self, rows: tuple[VerifyRow, ...], result: CommitResult) -> None:
        if result.faults:
            await self._planner.repair(result.faults)
        if len(result.faults) == len(rows):
            await self._wakeup.back_off()
        else:
            self._wakeup.made_progress()

    async def _idle(self) -> None:
        """Sleep while nothing can be computed: until something changes, or until blocks may have been freed."""
        if self._target.is_stale:
            await self._target.refresh()
        elif len(self._table):
            await self._wakeup.back_off()
            await self._target.refresh()
        elif not await self._wakeup.wait(GRACE_SECONDS):
            await self._target.refresh()  # notices a target that was lost while no request ran

    async def _recover(self, error: TargetUnavailable) -> None:
        """Wait for the target and release the sequences that it may still hold. All are opened again."""
        log.warning("the target is lost, %d sequences wait for it: %s", len(self._table.running), error)
        self._target_lost_at = self._clock()
        try:
            await self._wakeup.pause()
            await self._target.connect(self._planner.open_ids)
        finally:
            self._target_lost_at = None
        self._planner.target_lost()
        self._proposer.start(self._target.info)
        self._admission.fail_misfits(self._target.info)
