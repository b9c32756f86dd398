"""What the speculation controller learns from a round: its time, its drafts, and what it committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.coordinator.drafting.target_budgets import TargetBudgets
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import Proposal
from cluster.core.ids import SequenceId
from cluster.core.verification import StepResult, VerifyRow
from cluster.speculation.controller import SpeculationController


@dataclass(frozen=True, slots=True)
class RoundDrafts:
    """The drafts of one round."""

    proposals: Mapping[SequenceId, Proposal] = field(default_factory=dict)
    """The drafts to verify."""
    asked: int = 0
    """Number of sequences that were drafted for."""
    waited: float = 0.0
    """Time that the round waited for proposals, in seconds."""
    expected_step_seconds: float | None = None
    """Time that the step is expected to take, in seconds; `None` without a speculation controller."""
    forced: Mapping[SequenceId, int] = field(default_factory=dict)
    """Numbers of tokens that grammars force and that the round verifies, with or without a draft."""


class RoundObserver:
    """Tells the controller of each round. Rounds that read prompts are not compared with others."""

    def __init__(self, controller: SpeculationController, metrics: Metrics, on_target: TargetBudgets | None) -> None:
        """`on_target` is set if the target drafts."""
        self._controller = controller
        self._metrics = metrics
        self._on_target = on_target

    def observe(self, rows: Sequence[VerifyRow], drafts: RoundDrafts, seconds: float, step: StepResult) -> None:
        """Learn from a round that took `seconds` seconds.

        What grammars force is committed with and without drafts, so those tokens count neither as drafted nor as
        committed. A round that verifies nothing else than them is like no other and left out.
        """
        forced = sum(drafts.forced.get(row.sequence_id, 0) for row in rows)
        tokens = sum(row.width for row in rows)
        has_nodes = tokens > len(rows) + forced
        if self._on_target is None:
            waited, is_drafted = drafts.waited, has_nodes or drafts.waited > 0.0
        else:
            waited, is_drafted = step.draft_seconds, self._observe_target(rows, step.draft_seconds) or has_nodes
        if any(len(row.pending) > 1 or not row.start_len for row in rows):
            self._controller.observe_lost(len(rows), waited)
            return
        if forced and not is_drafted:
            return
        committed = sum(
            len(verdict.tokens) - min(verdict.accepted, drafts.forced.get(verdict.sequence_id, 0))
            for verdict in step.verdicts
        )
        unwaited = max(0.0, seconds - waited)
        self._controller.observe_round(
            len(rows), tokens, unwaited, waited=waited, committed=committed, is_drafted=is_drafted
        )
        if drafts.expected_step_seconds is not None:
            self._metrics.predicted_round(drafts.expected_step_seconds + drafts.waited, seconds)

    def _observe_target(self, rows: Sequence[VerifyRow], draft_seconds: float) -> bool:
        """Learn how long the target drafted. Returns whether it drafted for the next round; a probe does not count."""
        budgets = self._on_target
        asked = {row.sequence_id: row.next_budget.max_depth for row in rows if row.next_budget.max_nodes}
        if budgets is None or not asked:
            return False
        expected = self._controller.propose_seconds(len(asked), max(asked.values()))
        if budgets.are_caught_up(asked):
            self._controller.observe_wait(len(asked), max(asked.values()), draft_seconds)
        budgets.mark_caught_up(asked, draft_seconds - expected)
        return not asked.keys().isdisjoint(budgets.requested)
