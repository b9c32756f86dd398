"""Who runs, and what the target holds of whom: preempt, admit, open, until a plan asks for none of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.coordinator.clients.target import TargetLink
from cluster.coordinator.isolate import Suspects
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.registry import Roster
from cluster.coordinator.running import Lane
from cluster.core import scheduler
from cluster.core.config import SchedulerSection
from cluster.core.drafting import DraftBudget
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.scheduler import Plan, State
from cluster.core.verification import OpenRow


class Arranger:
    """Moves lanes between waiting and running, and the target's memory with them."""

    def __init__(
        self,
        roster: Roster,
        link: TargetLink,
        suspects: Suspects,
        metrics: Metrics,
        limits: SchedulerSection,
        draft: DraftBudget,
    ) -> None:
        self._roster = roster
        self._link = link
        self._suspects = suspects
        self._metrics = metrics
        self._limits = limits
        self._draft = draft

    async def plan(self) -> Plan:
        """The next step. Its rows start where the stored KV of their sequences ends. Raises `TargetUnavailable`.

        Planning is pure and cheap, so it is done again whenever the target has given or taken memory: what a
        preempted sequence shared stays taken, and what an opened one shares was free. Each turn preempts, admits or
        opens somebody, so there are few.
        """
        while True:
            plan = scheduler.plan(self._state())
            if (plan.preempt or not plan.rows) and (ended := self._roster.dismiss_ended()):
                await self._evict(ended)  # they give way before anyone who runs
            elif plan.preempt:
                await self.put_back(plan.preempt)
            else:
                for sequence_id in plan.admit:
                    self._roster.admit(sequence_id)
                fresh = [lane for lane in self._roster.running.values() if self._is_to_open(lane)]
                if not fresh:
                    return plan
                await self._open(fresh)

    async def put_back(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Preempt running sequences: others take their blocks, and what is stored still is found again later."""
        lanes = [lane for sequence_id in sequence_ids if (lane := self._roster.put_back(sequence_id)) is not None]
        self._metrics.preempted(len(lanes))
        await self._evict(lanes)

    async def reopen(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The target and the books disagree on running sequences: they are freed, to be opened anew."""
        lanes = [lane for sequence_id in sequence_ids if (lane := self._roster.running.get(sequence_id)) is not None]
        self._metrics.replayed(len(lanes))
        await self._evict(lanes)

    def held(self) -> list[SequenceId]:
        """The live sequences of which the target may hold something."""
        return [lane.id for lane in self._roster.lanes() if lane.is_open]

    def lost(self) -> None:
        """The target holds nothing of the live sequences any more."""
        self._roster.dismiss_ended()
        self._metrics.replayed(len(self._roster.running))
        for lane in self._roster.lanes():
            lane.sequence.opened(0)
            lane.is_open = False

    def _state(self) -> State:
        """What the plan depends on, frozen."""
        info = self._link.info
        return State(
            waiting=self._roster.waiting_views(self._limits.max_sequences),
            running=self._roster.running_views(),
            kv=self._link.kv,
            layout=info.layout,
            max_context_len=info.max_context_len,
            limits=self._limits,
            draft=self._draft,
        )

    def _is_to_open(self, lane: Lane) -> bool:
        return not lane.is_open and not self._suspects.is_suspect(lane)

    async def _open(self, lanes: Sequence[Lane]) -> None:
        """Ask the target for what it has of them."""
        rows = tuple(_row(lane) for lane in lanes)
        known = [lane.was_open for lane in lanes]
        for lane in lanes:
            lane.touch()
        try:
            lens = await self._link.open(rows)
        except TargetUnavailable:
            self._suspects.lost(lanes)
            raise
        for lane, row, was_open, stored_len in zip(lanes, rows, known, lens, strict=True):
            lane.sequence.opened(stored_len)
            self._metrics.opened(len(row.tokens), stored_len, again=was_open, from_parent=row.parent is not None)

    async def _evict(self, lanes: Sequence[Lane]) -> None:
        """Free what the target holds of them, before anything else is sent."""
        for lane in lanes:
            lane.sequence.opened(0)
        await self._link.evict([lane.id for lane in lanes if lane.is_open])
        for lane in lanes:
            lane.is_open = False


def _row(lane: Lane) -> OpenRow:
    sequence, source = lane.sequence, lane.source
    return OpenRow(sequence.id, tuple(sequence.tokens), sequence.start, None if source is None else source.id)
