"""The loop of the coordinator. Each round plans, proposes, verifies, commits and emits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.coordinator.admit import AdmissionController
from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.commit import CommitResult, Committer
from cluster.coordinator.emit import Emitter
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.observability.traces import RequestTracer
from cluster.coordinator.plan import Planner
from cluster.coordinator.propose import Proposer
from cluster.coordinator.requests.delivery import call_during_step
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable
from cluster.coordinator.round_timer import RoundTimer
from cluster.coordinator.verify import Verifier
from cluster.coordinator.wakeup import LoopProgress, Wakeup
from cluster.core.errors import NotReady, TargetUnavailable
from cluster.core.scheduling.state import Plan
from cluster.core.verification import StepResult, VerifyRow

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Seconds for which a target may be lost before new requests are refused, and between checks of an idle target."""
RESTART_SECONDS = 1.0
"""Pause before the loop starts again after a bug, in seconds."""


class Loop:
    """Serves the requests of the table between `start()` and `stop()`."""

    def __init__(
        self,
        table: RequestTable,
        target: TargetClient,
        admission: AdmissionController,
        planner: Planner,
        proposer: Proposer,
        verifier: Verifier,
        committer: Committer,
        emitter: Emitter,
        wakeup: Wakeup,
        progress: LoopProgress,
        metrics: Metrics,
        clock: Callable[[], float],
        tracer: RequestTracer | None,
    ) -> None:
        self._table = table
        self._target = target
        self._admission = admission
        self._planner = planner
        self._proposer = proposer
        self._verifier = verifier
        self._committer = committer
        self._emitter = emitter
        self._wakeup = wakeup
        self._progress = progress
        self._metrics = metrics
        self._clock = clock
        self._tracer = tracer
        self._is_running = False
        self._is_stopped = False
        self._target_lost_at: float | None = None
        self._advanced_at = clock()
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
                timer = RoundTimer(self._clock)
                wanted = self._proposer.size_trees(self._planner.candidates())
                plan = await self._planner.plan(wanted)
                if plan.rows:
                    await self._round(plan, timer)
                else:
                    await self._idle()
                self._advanced_at = self._clock()
            except TargetUnavailable as error:
                await self._recover(error)

    async def _round(self, plan: Plan, timer: RoundTimer) -> None:
        """Propose, verify, commit and emit one plan."""
        plan, next_half = self._proposer.split(plan)
        timer.propose_begins()
        drafts = await self._proposer.propose(plan)
        rows = self._verifier.rows(plan, drafts.proposals, self._proposer.next_budgets(plan))
        if not rows:
            return
        timer.step_begins()
        self._proposer.work_during_step(next_half)
        step = await self._verifier.verify(rows)
        timer.step_ends()
        self._proposer.receive(rows, step)
        if self._tracer is not None:
            self._tracer.round_decided(self._requests_of(rows))
        result = self._committer.commit(rows, step)
        self._emitter.emit(result.commits)
        call_during_step(self._metrics.decided, result.decided)
        if self._tracer is not None:
            self._tracer.round_ended(timer.times(proposed=drafts.asked > 0))
        await self._repair(rows, result)
        seconds = timer.total_seconds()
        self._proposer.observe_round(rows, drafts, seconds, step)
        waited = drafts.waited if drafts.asked else None
        call_during_step(self._record, rows, step, seconds, timer.step_seconds, waited)

    def _record(
        self,
        rows: tuple[VerifyRow, ...],
        step: StepResult,
        seconds: float,
        step_seconds: float,
        waited: float | None,
    ) -> None:
        """Record a round of `seconds` in the metrics. `waited` is how long it waited for drafts, if it had any."""
        self._metrics.round(
            tokens=sum(row.width for row in rows),
            useful=sum(len(row.pending) for row in rows if len(row.pending) > 1 or not row.decide)
            + sum(len(verdict.tokens) for verdict in step.verdicts),
            total=seconds,
            propose=waited,
            step=step_seconds,
            target=step.step_seconds,
        )

    def _requests_of(self, rows: tuple[VerifyRow, ...]) -> list[LiveRequest]:
        """The live requests that the rows belong to, each once."""
        running = (self._table.running.get(row.sequence_id) for row in rows)
        found = (None if live is None else self._table.request_of(live) for live in running)
        return list({request.id: request for request in found if request is not None}.values())

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
            await self._wakeup.back_off()
            await self._target.connect(self._planner.open_ids)
        finally:
            self._target_lost_at = None
        self._planner.target_lost()
        self._proposer.start(self._target.info)
        self._admission.fail_misfits(self._target.info)
