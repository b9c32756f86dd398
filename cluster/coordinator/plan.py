"""Plan: choose the rows of the next step. Preempt, admit and open sequences until the plan requires no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.instruments import Instruments
from cluster.coordinator.quarantine import Quarantine
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.config.sections import SchedulerSection
from cluster.core.drafting import DraftBudget, RowFaultCode
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.scheduling import scheduler
from cluster.core.scheduling.state import Plan, State, WantedDrafts
from cluster.core.verification import OpenRow


class Planner:
    """Plans steps. Moves sequences between waiting and running, and opens and evicts them on the target."""

    def __init__(
        self,
        table: RequestTable,
        target: TargetClient,
        quarantine: Quarantine,
        limits: SchedulerSection,
        max_draft: DraftBudget,
        instruments: Instruments,
    ) -> None:
        self._table = table
        self._target = target
        self._quarantine = quarantine
        self._limits = limits
        self._max_draft = max_draft
        self._metrics = instruments.metrics
        self._clock = instruments.clock

    async def plan(self, wanted: WantedDrafts) -> Plan:
        """Plan the next step. Each row starts where the stored KV of its sequence ends. Raises `TargetUnavailable`.

        Planning is pure and cheap, so it is repeated whenever blocks were allocated or freed on the target: the blocks
        that a preempted sequence shared stay allocated, and those that an opened one shares were free. Each repetition
        preempts, admits or opens a sequence, so there are few.
        """
        while True:
            plan = scheduler.plan(self._state(wanted))
            if (plan.preempt or not plan.rows) and (finished := self._table.drop_finished()):
                await self._evict(finished)  # before any running sequence is preempted
            elif plan.preempt:
                await self._preempt(plan.preempt)
            else:
                for sequence_id in plan.admit:
                    self._table.admit(sequence_id, self._clock())
                running = self._table.running.values()
                unopened = [live for live in running if not live.is_open and not live.is_quarantined]
                if not unopened:
                    return plan
                await self._open(unopened)

    async def repair(self, faults: Mapping[SequenceId, RowFaultCode]) -> None:
        """Evict sequences that the target lost, to open them again; preempt the latest arrival if blocks ran out.

        Sequences that the target was not ready for let the others go first for a while.

        Raises `TargetUnavailable`.
        """
        self._quarantine.defer(sequence_id for sequence_id, code in faults.items() if code is RowFaultCode.NOT_READY)
        lost = [
            live
            for sequence_id, code in faults.items()
            if code is RowFaultCode.OUT_OF_SYNC and (live := self._table.running.get(sequence_id)) is not None
        ]
        if lost:
            self._metrics.replayed(len(lost))
            await self._evict(lost)
        if RowFaultCode.KV_EXHAUSTED in faults.values() and self._table.running:
            latest = max(self._table.running.values(), key=lambda live: live.order)
            await self._preempt((latest.id,))

    def candidates(self) -> Iterator[LiveSequence]:
        """Yield the sequences that may have a row soon: the running ones, and the first of those that wait."""
        yield from self._table.running.values()
        yield from self._table.waiting(self._limits.max_sequences)

    def open_ids(self) -> list[SequenceId]:
        """The running sequences whose KV the target may hold."""
        return [live.id for live in self._table.sequences() if live.is_open]

    def target_lost(self) -> None:
        """Record that the target has lost all live sequences. They are sent again."""
        self._table.drop_finished()
        self._metrics.replayed(len(self._table.running))
        for live in self._table.sequences():
            live.mark_released()

    def _state(self, wanted: WantedDrafts) -> State:
        info, running, now = self._target.info, self._table.running.values(), self._clock()
        room = self._limits.max_sequences - len(running)
        waiting = self._table.waiting(room) if room > 0 else ()  # no other one can be admitted
        return State(
            waiting=tuple([live.view(wanted.of(live.id), now) for live in waiting]),
            running=tuple([live.view(wanted.of(live.id), now) for live in running]),
            kv=self._target.kv,
            layout=info.layout,
            max_context_len=info.max_context_len,
            limits=self._limits,
            max_draft=self._max_draft,
        )

    async def _preempt(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Free the blocks of running sequences for older ones. Blocks left in the prefix cache are reused later."""
        preempted = [live for sequence_id in sequence_ids if (live := self._table.preempt(sequence_id)) is not None]
        self._metrics.preempted(len(preempted))
        await self._evict(preempted)

    async def _open(self, sequences: Sequence[LiveSequence]) -> None:
        """Open sequences on the target, which returns how much of their KV it has stored."""
        rows = tuple(_open_row(live) for live in sequences)
        resumed = [live.has_been_open for live in sequences]
        for live in sequences:
            live.mark_sent()
        try:
            stored_lens = await self._target.open(rows)
        except TargetUnavailable:
            self._quarantine.record_loss(dict.fromkeys(live.id for live in sequences))
            raise
        for live, row, is_resumed, stored_len in zip(sequences, rows, resumed, stored_lens, strict=True):
            live.mark_stored(stored_len)
            self._metrics.opened(len(row.tokens), stored_len, resumed=is_resumed, from_parent=row.parent is not None)

    async def _evict(self, sequences: Sequence[LiveSequence]) -> None:
        """Free the blocks of the sequences on the target before anything else is sent."""
        await self._target.evict([live.id for live in sequences if live.is_open])
        for live in sequences:
            live.mark_released()


def _open_row(live: LiveSequence) -> OpenRow:
    sequence, source = live.sequence, live.kv_source
    return OpenRow(sequence.id, tuple(sequence.tokens), sequence.start, None if source is None else source.id)
