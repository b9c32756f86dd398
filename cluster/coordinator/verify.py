"""Verify: build the rows of a plan and let the target compute them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.quarantine import Quarantine
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.drafting import NO_DRAFT, DraftBudget, Proposal
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.scheduler import Plan, PlannedRow
from cluster.core.tree import EMPTY_TREE
from cluster.core.verification import StepResult, VerifyRow


class Verifier:
    """Sends rows to the target."""

    def __init__(self, table: RequestTable, target: TargetClient, quarantine: Quarantine) -> None:
        self._table = table
        self._target = target
        self._quarantine = quarantine

    def rows(
        self,
        plan: Plan,
        proposals: Mapping[SequenceId, Proposal],
        next_budgets: Mapping[SequenceId, DraftBudget] = MappingProxyType({}),
    ) -> tuple[VerifyRow, ...]:
        """Return the rows to send, with the budgets of the drafts that the target proposes next. No state changes."""
        return self._quarantine.select(build_rows(plan, self._table.running, proposals, next_budgets))

    async def verify(self, rows: tuple[VerifyRow, ...]) -> StepResult:
        """Compute the rows in one forward pass. Raises `TargetUnavailable`."""
        running = self._table.running
        for row in rows:
            running[row.sequence_id].mark_sent()
        try:
            return await self._target.step(rows)
        except TargetUnavailable:
            self._quarantine.record_loss(running.get(row.sequence_id) for row in rows)
            raise


def build_rows(
    plan: Plan,
    running: Mapping[SequenceId, LiveSequence],
    proposals: Mapping[SequenceId, Proposal],
    next_budgets: Mapping[SequenceId, DraftBudget] = MappingProxyType({}),
) -> tuple[VerifyRow, ...]:
    """The planned rows of the sequences that still run, each with its draft and its next budget if it has them."""
    rows: list[VerifyRow] = []
    for planned in plan.rows:
        live = running.get(planned.sequence_id)
        if live is None:
            continue
        sequence = live.sequence
        first, end = sequence.stored_len, sequence.stored_len + planned.pending
        draft = _trim(proposals.get(sequence.id), planned)
        row = VerifyRow(
            sequence_id=sequence.id,
            base_len=end,
            pending=tuple(sequence.tokens[first:end]),
            tree=EMPTY_TREE if draft is None else draft.tree,
            decide=planned.decide,
            start=sequence.start if first == 0 else None,
            distributions=() if draft is None else draft.distributions,
            next_budget=next_budgets.get(sequence.id, NO_DRAFT),
        )
        rows.append(row)
    return tuple(rows)


def _trim(proposal: Proposal | None, planned: PlannedRow) -> Proposal | None:
    """Return the part of the draft that the plan has tokens for. An earlier plan may have requested a larger tree."""
    if proposal is None or not planned.decide:
        return None
    nodes = proposal.tree.within(planned.draft.max_nodes, planned.draft.max_depth)
    if len(nodes) < len(proposal.tree) and not proposal.is_prunable:
        return None
    return proposal.subset(nodes)
