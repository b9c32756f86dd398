"""Budgets of the drafts that a drafter on the target proposes with each step, for the next round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.coordinator.clients.draft_source import DraftSource
from cluster.coordinator.clients.drafter_pool import PREFILL_TOKENS
from cluster.coordinator.drafting.probe import BackgroundProbes
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.drafting import EVIDENCE_ONLY, NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow
from cluster.speculation.controller import SpeculationController

_CATCH_UP_RATE = 0.25
"""Share of a first draft's deviation that goes into the mean extra time of first drafts."""


class TargetBudgets:
    """Chooses the budgets that the rows of a step bring, and remembers what they requested."""

    def __init__(
        self,
        source: DraftSource,
        controller: SpeculationController | None,
        probes: BackgroundProbes | None,
        running: Mapping[SequenceId, LiveSequence],
        max_draft: DraftBudget,
        first_draft: DraftBudget,
    ) -> None:
        """`first_draft` is the largest tree of a sequence that has not been sized."""
        self._source = source
        self._controller = controller
        self._probes = probes
        self._running = running
        self._max_draft = max_draft
        self._first_draft = first_draft
        self._sized: Mapping[SequenceId, DraftBudget] = {}
        self._caught_up: set[SequenceId] = set()
        """Sequences that the target has drafted for before. A first draft also computes what came before it."""
        self._catch_up_seconds = 0.0
        """Mean time by which the first draft of a sequence exceeds later ones, in seconds."""
        self.requested: Mapping[SequenceId, DraftBudget] = {}
        """Budgets of the drafts that the target has proposed with the latest step."""
        self.chosen: Mapping[SequenceId, DraftBudget] = {}
        """What `choose` returned last."""

    def size(self, budgets: Mapping[SequenceId, DraftBudget]) -> None:
        """Use the budgets that the speculation controller chose for the drafts of the next round."""
        self._sized = budgets

    def choose(self, plan: Plan) -> Mapping[SequenceId, DraftBudget]:
        """The budgets of the plan's rows. Rows without a draft and without evidence for the drafter are missing.

        Rows of which the drafter will need what the step shows have the budget `EVIDENCE_ONLY`.
        """
        controller, rows = self._controller, len(plan.rows)
        starts = controller is None or controller.starts_with_drafts(max(rows, len(self._running)))
        is_active = starts or (controller is not None and not controller.is_idle)
        is_near = self._drafts_are_near(rows)
        wanted: dict[SequenceId, DraftBudget] = {}
        shown: dict[SequenceId, DraftBudget] = {}
        for row in plan.rows:
            live = self._running.get(row.sequence_id)
            if live is None:
                continue
            largest = live.largest_draft(self._max_draft)
            # A drafter takes long to catch up on a prompt, so it is shown prompts only while there are drafts.
            if largest.max_nodes and (is_active or (is_near and row.decide and row.pending == 1)):
                shown[live.id] = EVIDENCE_ONLY
            budget = self._budget(row, largest, starts=starts)
            if budget.max_nodes and not self._is_worth_catching_up(live, rows):
                budget = NO_DRAFT
            if budget.max_nodes:
                wanted[live.id] = budget
        self.requested = wanted
        self.chosen = {**shown, **self._source.next_budgets(wanted)}
        return self.chosen

    def are_caught_up(self, sequence_ids: Iterable[SequenceId]) -> bool:
        """Whether drafts of the target for the sequences compute little that came before them."""
        return all(map(self._is_caught_up, sequence_ids))

    def mark_caught_up(self, sequence_ids: Iterable[SequenceId], extra_seconds: float = 0.0) -> None:
        """Record that the target has drafted for the sequences.

        `extra_seconds` is the time of these drafts that exceeds later ones, in seconds.
        """
        first = [sequence_id for sequence_id in sequence_ids if not self._is_caught_up(sequence_id)]
        if first:
            rate = _CATCH_UP_RATE if self._catch_up_seconds else 1.0
            self._catch_up_seconds += rate * (max(0.0, extra_seconds) / len(first) - self._catch_up_seconds)
        self._caught_up.update(sequence_ids)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forget sequences that have ended."""
        self._caught_up.difference_update(sequence_ids)

    def _budget(self, row: PlannedRow, largest: DraftBudget, *, starts: bool) -> DraftBudget:
        if not row.decide:
            return NO_DRAFT
        sized = self._sized.get(row.sequence_id)
        if sized is not None:
            return within(sized, largest)
        if starts and (self._controller is None or row.pending > 1):
            return within(self._first_draft, largest)  # it has not been sized yet, because it did not decide
        return NO_DRAFT

    def _is_worth_catching_up(self, live: LiveSequence, rows: int) -> bool:
        """Whether drafts will save more time than the first one takes because it computes what came before it."""
        if self._controller is None or self._is_caught_up(live.id):
            return True
        return self._controller.is_worth_prefilling(self._catch_up_seconds, rows, live.sequence.remaining)

    def _drafts_are_near(self, rows: int) -> bool:
        """Whether a probe or the end of a suspension is near, so that the drafter should know the steps before it."""
        controller, probes = self._controller, self._probes
        return controller is not None and (controller.resumes_soon(rows) or (probes is not None and probes.are_near))

    def _is_caught_up(self, sequence_id: SequenceId) -> bool:
        live = self._running.get(sequence_id)
        return sequence_id in self._caught_up or live is None or len(live.sequence) <= PREFILL_TOKENS


def within(budget: DraftBudget, largest: DraftBudget) -> DraftBudget:
    """The budget, no larger than another one."""
    return DraftBudget(min(budget.max_nodes, largest.max_nodes), min(budget.max_depth, largest.max_depth))
