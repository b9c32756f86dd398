"""A fake target in simulated time that drafts for its own next step."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.core.drafting import EVIDENCE_ONLY, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.verification import StepBatch, StepResult, Verdict, VerifyRow
from tests.support.fakes.simulated_time import DrafterModel, StepTime, TimedDrafter, TimedTarget


class DraftingTarget(TimedTarget):
    """Proposes a chain after each row with a budget. Drafting takes the time of the `DrafterModel`."""

    def __init__(self, step_time: StepTime, model: DrafterModel, *, profiled: bool = True) -> None:
        super().__init__(step_time, profiled=profiled)
        self.drafter = TimedDrafter(self, model)
        self.asked: list[int] = []
        """Number of rows with a budget, for each step."""
        self.first_seconds = 0.0
        """Further time of a sequence's first draft, in seconds."""
        self.shown = 0
        """Number of chunks of prompts that the drafter was shown."""
        self.prompt_seconds = 0.0
        """Time that the drafter takes for a chunk of a prompt that it is shown, in seconds."""
        self._known: set[SequenceId] = set()

    async def step(self, batch: StepBatch) -> StepResult:
        result = await super().step(batch)
        budgets = [row.next_budget for row in batch.rows if row.next_budget.max_nodes]
        self.asked.append(len(budgets))
        shown = sum(row.next_budget == EVIDENCE_ONLY and len(row.pending) > 1 for row in batch.rows)
        self.shown += shown
        reading = self.prompt_seconds * shown
        if not budgets:
            await asyncio.sleep(reading)
            return replace(result, draft_seconds=reading)
        model, deepest = self.drafter.model, max(budget.max_depth for budget in budgets)
        seconds = reading + model.call_seconds + model.row_seconds * len(budgets) + model.depth_seconds * deepest
        asked = {row.sequence_id for row in batch.rows if row.next_budget.max_nodes}
        seconds += self.first_seconds * len(asked - self._known)
        self._known |= asked
        await asyncio.sleep(seconds)
        verdicts = tuple(
            replace(verdict, proposal=self._proposal(row, verdict))
            for row, verdict in zip(batch.rows, result.verdicts, strict=True)
        )
        return replace(result, verdicts=verdicts, draft_seconds=seconds)

    def _proposal(self, row: VerifyRow, verdict: Verdict) -> Proposal | None:
        if not row.next_budget.max_nodes or not verdict.tokens:
            return None
        stored = self.stored[row.sequence_id]
        tokens = (*stored.tokens, verdict.tokens[-1])
        asked = DraftRow(row.sequence_id, len(tokens), tokens, row.next_budget, stored.start)
        return self.drafter.answer(asked)
