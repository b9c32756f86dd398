"""Propose: get draft trees for the rows of a round, and choose the nodes to verify.

The rows of a round are drafted for before their step, and the round waits for the proposals. With alternating halves,
the rows of the next round are drafted for while the target computes this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.coordinator.clients.draft_source import DraftCalls, DraftSource
from cluster.coordinator.drafting.probe import BackgroundProbes
from cluster.coordinator.drafting.rest import Rest
from cluster.coordinator.drafting.round_observer import RoundDrafts, RoundObserver
from cluster.coordinator.drafting.target_budgets import TargetBudgets, within
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.requests.delivery import call_during_step
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow, WantedDrafts
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepResult, TargetInfo, VerifyRow
from cluster.speculation.controller import REST_ROUNDS, SpeculationController

FIRST_DRAFT_ON_TARGET = DraftBudget(4, 2)
"""Largest draft tree on the target while nothing is known of its drafts, and for probes."""


class Proposer:
    """Requests drafts of the size that the speculation controller decides, or of the largest size without one."""

    def __init__(
        self,
        source: DraftSource,
        section: DraftSection,
        max_sequences: int,
        running: Mapping[SequenceId, LiveSequence],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._max_sequences = max_sequences
        self._running = running
        self._metrics = metrics
        self._clock = clock
        self.max_draft = DraftBudget(section.max_nodes, section.max_depth) if section.is_enabled else NO_DRAFT
        """The largest tree that any sequence may have."""
        has_controller = section.controller == "auto" and self.max_draft.max_nodes > 0
        # On the target, a step waits for drafts of any use, so the first ones are small.
        is_bounded = has_controller and section.is_colocated
        self._first_draft = within(FIRST_DRAFT_ON_TARGET, self.max_draft) if is_bounded else self.max_draft
        self._controller = (
            SpeculationController(self.max_draft, self._first_draft, is_ahead=is_bounded) if has_controller else None
        )
        self._probes = (
            None
            if self._controller is None
            else BackgroundProbes(source, self._controller, self._first_draft, clock, is_colocated=section.is_colocated)
        )
        self._on_target = (
            TargetBudgets(source, self._controller, self._probes, running, self.max_draft, self._first_draft)
            if section.is_colocated
            else None
        )
        self._observer = None if self._controller is None else RoundObserver(self._controller, metrics, self._on_target)
        self._alternates = section.alternate == "on" and not section.is_colocated
        self._rest = Rest()
        self._next_calls: DraftCalls | None = None
        self._wanted = WantedDrafts({}, None)
        self._deciding: frozenset[SequenceId] = frozenset()
        self._expected_rows = 1

    def start(self, info: TargetInfo) -> None:
        """Start to draft for a target that was reached for the first time or again."""
        self._source.start(info.vocabulary_size)
        if self._controller is not None:
            self._controller.start(info.profile)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended."""
        sequence_ids = tuple(sequence_ids)
        self._source.release(sequence_ids)
        if self._on_target is not None:
            self._on_target.release(sequence_ids)
        if self._controller is not None:
            self._controller.forget(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""
        await self._source.close(timeout_seconds)

    # --- before the plan ---

    def size_trees(self, sequences: Iterable[LiveSequence]) -> WantedDrafts:
        """Size the tree of each sequence. With a controller, only sequences that decode have a tree."""
        controller = self._controller
        if controller is None:
            return self._wanted
        candidates = tuple(sequences)
        present = [live.id for live in candidates]
        if self._rest.goes_on(present):
            return self._wanted
        self._learn_from_rest()
        unfinished = [live for live in candidates if live.sequence.finish is None]
        deciding = [live for live in unfinished if live.sequence.missing == 1]
        ids = frozenset([live.id for live in deciding])
        controller.meet(live.id for live in unfinished)
        if self._probes is not None and not ids <= self._deciding:
            self._probes.expect_new_sequences()
        # Sequences that wait or prefill decide soon, so they count: trees that pay only until then are not started.
        self._expected_rows = max(1, len(deciding), min(len(unfinished), self._max_sequences))
        if ids != self._deciding or controller.needs_sizing:
            requests = [
                DraftRequest(live.sequence, largest)
                for live in deciding
                if (largest := live.largest_draft(self.max_draft)).max_nodes
                and (controller.is_idle or self._is_worth_prefilling(live))
            ]
            controller.size_trees(requests, rows=self._expected_rows, halves=self._alternates)
        self._deciding = ids
        budgets = controller.next_budgets(len(deciding))
        if self._on_target is not None:  # the target drafts one round ahead
            self._on_target.size(budgets)
            budgets = self._on_target.requested
        self._wanted = WantedDrafts(budgets, NO_DRAFT)
        if not budgets and ids and self._probes is not None and not self._alternates:
            rounds = min(controller.idle_rounds(len(deciding)), self._probes.idle_rounds)
            self._rest.begin(present, len(deciding), int(min(rounds, REST_ROUNDS)))
        return self._wanted

    def split(self, plan: Plan) -> tuple[Plan, Plan]:
        """Split the rows into those of this round and of the next with alternating halves; prompts are in this one."""
        drafted = [row for row in plan.rows if _wants_draft(row)] if self._alternates else []
        if len(drafted) < 2:
            return plan, Plan()
        ready = {} if self._next_calls is None else self._next_calls.requests
        now = [row.sequence_id for row in drafted if row.sequence_id in ready] or [
            row.sequence_id for row in drafted[: len(drafted) // 2]
        ]
        later = {row.sequence_id for row in drafted}.difference(now)
        first = tuple(row for row in plan.rows if row.sequence_id not in later)
        return replace(plan, rows=first), Plan(rows=tuple(row for row in plan.rows if row.sequence_id in later))

    # --- the round ---

    async def propose(self, plan: Plan) -> RoundDrafts:
        """Get trees for the rows that decide and have tokens for a tree. Never raises."""
        begun = self._clock()
        forced = {row.sequence_id: row.forced for row in plan.rows if row.forced}
        calls, self._next_calls = self._next_calls, None
        if calls is None or not any(_wants_draft(row) and row.sequence_id in calls.requests for row in plan.rows):
            calls = self._call(plan.rows)
        if calls is None:
            return RoundDrafts(forced=forced)
        controller, asked = self._controller, len(calls.requests)
        await calls.wait(float("inf") if controller is None else controller.patience(asked, calls.depth))
        proposals = {
            sequence_id: proposal
            for sequence_id, proposal in calls.take().items()
            if (live := self._running.get(sequence_id)) is not None and proposal.base_len == len(live.sequence)
        }
        waited = self._clock() - begun
        for proposal in proposals.values():
            self._metrics.proposed(len(proposal.tree), proposal.ready)
        if controller is None:
            return RoundDrafts(proposals, asked, waited, forced=forced)
        if self._on_target is not None:
            waited = controller.propose_seconds(asked, calls.depth)  # the step spends it on the next drafts
        elif proposals or not calls.done:  # an immediate refusal does not show how long proposals take
            controller.observe_wait(len(proposals) or asked, calls.depth, waited)
        rows, tokens = sum(row.decide for row in plan.rows), sum(row.pending for row in plan.rows)
        pruned = controller.prune(calls.requests, proposals, rows=rows, tokens=tokens, waited=waited)
        for sequence_id in proposals:
            kept = pruned.proposals.get(sequence_id)
            self._metrics.pruned(0 if kept is None else len(kept.tree))
        return RoundDrafts(pruned.proposals, asked, waited, pruned.step_seconds, forced)

    def next_budgets(self, plan: Plan) -> Mapping[SequenceId, DraftBudget]:
        """The largest trees that a drafter on the target may propose with this step, for the next round.

        Rows of which the drafter will need what the step shows have the budget `EVIDENCE_ONLY`. Empty if drafts come
        from elsewhere.
        """
        if self._on_target is None:
            return {}
        return self._on_target.chosen if self._rest.is_on else self._on_target.choose(plan)

    def receive(self, rows: Sequence[VerifyRow], step: StepResult) -> None:
        """Take what a step brought for drafting: the drafts of the target, or evidence for drafters."""
        self._source.receive(rows, step)

    def work_during_step(self, later: Plan) -> None:
        """Draft for the next round, prefill drafters and probe while the target computes. Call it before the step."""
        if not self._rest.is_on:
            call_during_step(self._work_during_step, later)

    def observe_round(self, rows: Sequence[VerifyRow], drafts: RoundDrafts, seconds: float, step: StepResult) -> None:
        """Learn from a round that took `seconds` seconds. Rounds that read prompts are not compared with others."""
        if self._rest.is_on:
            self._rest.add(rows, seconds)
        elif self._observer is not None:
            self._observer.observe(rows, drafts, seconds, step)

    def _learn_from_rest(self) -> None:
        rested = self._rest.take()
        if rested is None or self._controller is None or self._probes is None:
            return
        self._controller.pass_rounds(rested.rows, rested.rounds)
        self._probes.pass_rounds(rested.rounds)
        if rested.timed:
            mean = rested.seconds / rested.timed
            self._controller.observe_plain(rested.rows, mean, rounds=rested.timed)

    def _call(self, rows: Iterable[PlannedRow]) -> DraftCalls | None:
        requests = {
            row.sequence_id: DraftRequest(live.sequence, row.draft)
            for row in rows
            if _wants_draft(row) and (live := self._running.get(row.sequence_id)) is not None
        }
        return self._source.propose(requests) if requests else None

    # --- while the target computes ---

    def _work_during_step(self, later: Plan) -> None:
        self._next_calls = self._call(later.rows)
        drafted = [live for live in self._running.values() if live.largest_draft(self.max_draft).max_nodes]
        controller = self._controller
        if controller is None or not controller.is_idle:
            self._source.prefill(live.sequence for live in drafted if self._is_worth_prefilling(live))
        if controller is None or self._probes is None:
            return
        controller.learn()
        self._probes.collect()
        without_draft = [live for live in drafted if live.sequence.missing == 1]
        self._probes.start([live for live in without_draft if self._wanted.of(live.id) == NO_DRAFT])

    def _is_worth_prefilling(self, live: LiveSequence) -> bool:
        """Whether drafts for the sequence will save more time than its drafter needs to prefill it."""
        if self._controller is None:
            return True
        seconds = self._source.prefill_seconds(live.sequence)
        return self._controller.is_worth_prefilling(seconds, self._expected_rows, live.sequence.remaining)


def _wants_draft(row: PlannedRow) -> bool:
    return row.decide and row.draft.max_nodes > 0
