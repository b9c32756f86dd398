"""Propose: choose the sizes of draft trees, get the trees for the rows of a round, and choose the nodes to verify."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from cluster.coordinator.clients.drafter_pool import DrafterPool
from cluster.coordinator.drafting.draft_source import DraftSource, within
from cluster.coordinator.drafting.elsewhere import DraftsElsewhere
from cluster.coordinator.drafting.on_target import DraftsOnTarget
from cluster.coordinator.drafting.probe import BackgroundProbes
from cluster.coordinator.instruments import Instruments
from cluster.coordinator.requests.delivery import call_during_step
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, WantedDrafts
from cluster.core.verification import StepResult, TargetInfo, VerifyRow
from cluster.speculation.controller import Controller, LargestTrees, SpeculationController
from cluster.speculation.observation import DraftTime, Observation, RoundDrafts, RoundRecord

FIRST_DRAFT_ON_TARGET = DraftBudget(4, 2)
"""Largest draft tree on the target while nothing is known of its drafts, and for probes. A step waits for drafts of any
use there, so the first ones are small."""


class Proposer:
    """Gets drafts of the size that a controller decides, from drafters elsewhere or on the target."""

    def __init__(
        self,
        source: DraftSource,
        controller: Controller,
        probes: BackgroundProbes | None,
        running: Mapping[SequenceId, LiveSequence],
        max_sequences: int,
        instruments: Instruments,
    ) -> None:
        """`probes` is set for a controller that is adaptive. At most `max_sequences` sequences run."""
        self._source = source
        self._controller = controller
        self._probes = probes
        self._running = running
        self._max_sequences = max_sequences
        self._metrics = instruments.metrics
        self._record: RoundRecord | None = None
        self._wanted = WantedDrafts({}, None)
        self._deciding: frozenset[SequenceId] = frozenset()
        self._expected_rows = 1

    @classmethod
    def of(
        cls,
        pool: DrafterPool | None,
        section: DraftSection,
        running: Mapping[SequenceId, LiveSequence],
        max_sequences: int,
        instruments: Instruments,
    ) -> Proposer:
        """Return a proposer as configured. `pool` has the drafters elsewhere; without one, the target drafts."""
        max_draft = DraftBudget(section.max_nodes, section.max_depth) if section.is_enabled else NO_DRAFT
        alternates = section.alternate == "on" and pool is not None
        controller: Controller = LargestTrees(max_draft)
        if section.controller == "auto" and max_draft.max_nodes > 0:
            first_draft = max_draft if pool is not None else within(FIRST_DRAFT_ON_TARGET, max_draft)
            controller = SpeculationController(max_draft, first_draft, is_ahead=pool is None, halves=alternates)
        source: DraftSource
        if pool is None:
            source = DraftsOnTarget(controller, running, instruments.metrics)
        else:
            source = DraftsElsewhere(pool, running, instruments.metrics, instruments.clock, alternates=alternates)
        probes = None
        if controller.is_adaptive:
            probes = BackgroundProbes(source, controller.first_draft, instruments.clock, pool=pool)
        return cls(source, controller, probes, running, max_sequences, instruments)

    @property
    def max_draft(self) -> DraftBudget:
        """The largest tree that any sequence may have."""
        return self._controller.max_draft

    def start(self, info: TargetInfo) -> None:
        """Start to draft for a target that was reached for the first time or again."""
        self._source.start(info.vocabulary_size)
        self._controller.start(info.profile)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended."""
        sequence_ids = tuple(sequence_ids)
        self._source.release(sequence_ids)
        self._controller.forget(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""
        await self._source.close(timeout_seconds)

    # --- before the plan ---

    def size_trees(self, candidates: Iterable[LiveSequence]) -> WantedDrafts:
        """Decide how large the next trees are. With a controller, only sequences that decode have a tree."""
        if self._probes is None:
            return self._wanted
        unfinished = [live for live in candidates if live.sequence.finish is None]
        deciding = [live.sequence for live in unfinished if live.sequence.missing == 1]
        ids = frozenset([sequence.id for sequence in deciding])
        if not ids <= self._deciding:
            self._probes.expect_new_sequences()
        self._deciding = ids
        # Sequences that wait or prefill decide soon, so they count: trees must save time beside them too.
        self._expected_rows = max(1, len(deciding), min(len(unfinished), self._max_sequences))
        observation = Observation(
            present=frozenset([live.id for live in unfinished]),
            deciding=deciding,
            rows=self._expected_rows,
            waiting=() if deciding or self._expected_rows == 1 else [live.sequence for live in unfinished],
            record=self._record,
            probe=self._probes.take(self._record, is_idle=self._controller.is_idle),
            prefill_seconds=self._source.prefill_seconds,
        )
        self._record = None
        self._wanted = self._source.plan_with(self._controller.decide(observation))
        return self._wanted

    def split(self, plan: Plan) -> tuple[Plan, Plan]:
        """Split the rows into those of this round and those that are drafted for meanwhile."""
        return self._source.split(plan)

    # --- the round ---

    async def propose(self, plan: Plan, later: Plan) -> RoundDrafts:
        """Get trees for the rows that decide and have tokens for a tree. Never raises. `later`: see `split`."""
        forced = {row.sequence_id: row.forced for row in plan.rows if row.forced}
        found = await self._source.propose(plan.rows, self._controller.patience)
        proposals, step_seconds = found.proposals, None
        for proposal in proposals.values():
            self._metrics.proposed(len(proposal.tree), proposal.ready)
        if found.requests and self._controller.is_adaptive:
            pruned = self._controller.prune(
                found.requests,
                proposals,
                rows=sum(row.decide for row in plan.rows),
                tokens=sum(row.pending for row in plan.rows),
                waited=found.waited,
            )
            for sequence_id in proposals:
                kept = pruned.proposals.get(sequence_id)
                self._metrics.pruned(0 if kept is None else len(kept.tree))
            proposals, step_seconds = pruned.proposals, pruned.step_seconds
        probed = () if self._probes is None else self._probes.upcoming(self._without_drafts())
        return RoundDrafts(
            proposals=proposals,
            asked=len(found.requests),
            waited=found.waited,
            sample=found.sample,
            step_seconds=step_seconds,
            forced=forced,
            next_budgets=self._source.next_budgets(plan, probed),
            later=len(later.rows),
            wants_following=self._source.wants_following,
        )

    def receive(self, rows: tuple[VerifyRow, ...], step: StepResult, drafts: RoundDrafts) -> DraftTime:
        """Take what a step brought for drafting: the drafts of the target, or evidence for drafters."""
        return self._source.receive(rows, step, drafts)

    def observe(self, record: RoundRecord) -> None:
        """Keep the record of a round for the next decision."""
        self._record = record

    # --- while the target computes ---

    def work_during_step(self, later: Plan) -> None:
        """Draft for the next round, prefill drafters and probe while the target computes. Call it before the step."""
        call_during_step(self._work_during_step, later)

    def _work_during_step(self, later: Plan) -> None:
        controller, probes = self._controller, self._probes
        drafted = (live for live in self._running.values() if live.largest_draft(self.max_draft).max_nodes)
        unprefilled = (live.sequence for live in drafted if self._is_worth_prefilling(live))
        self._source.work_during_step(later, () if controller.is_idle else unprefilled)
        controller.learn()
        if probes is not None:
            probes.start(self._without_drafts())

    def _without_drafts(self) -> Iterator[LiveSequence]:
        """Yield the sequences that decode and could have drafts, but none is wanted for them."""
        for live in self._running.values():
            is_decoding = live.sequence.missing == 1 and self._wanted.of(live.id) == NO_DRAFT
            if is_decoding and live.largest_draft(self.max_draft).max_nodes:
                yield live

    def _is_worth_prefilling(self, live: LiveSequence) -> bool:
        """Whether drafts for the sequence will save more time than its drafter needs to prefill it."""
        seconds = self._source.prefill_seconds(live.sequence)
        return self._controller.is_worth_prefilling(seconds, self._expected_rows, live.sequence.remaining)
