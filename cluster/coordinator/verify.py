"""Verify: build the rows of a plan and let the target compute them."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.quarantine import Quarantine
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.scheduler import Plan, PlannedRow
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepResult, VerifyRow


class Verifier:
    """Sends rows to the target."""

    def __init__(self, table: RequestTable, target: TargetClient, quarantine: Quarantine) -> None:
        self._table = table
        self._target = target
        self._quarantine = quarantine

    def rows(self, plan: Plan, trees: Mapping[SequenceId, TokenTree]) -> tuple[VerifyRow, ...]:
        """Return the rows to send. No state changes."""
        return self._quarantine.select(build_rows(plan, self._table.running, trees))

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
    plan: Plan, running: Mapping[SequenceId, LiveSequence], trees: Mapping[SequenceId, TokenTree]
) -> tuple[VerifyRow, ...]:
    """The planned rows of the sequences that still run, each with its tree if it has one."""
    rows: list[VerifyRow] = []
    for planned in plan.rows:
        live = running.get(planned.sequence_id)
        if live is None:
            continue
        sequence = live.sequence
        first, end = sequence.stored_len, sequence.stored_len + planned.pending
        row = VerifyRow(
            sequence_id=sequence.id,
            base_len=end,
            pending=tuple(sequence.tokens[first:end]),
            tree=_trim(trees.get(sequence.id), planned),
            decide=planned.decide,
            start=sequence.start if first == 0 else None,
        )
        rows.append(row)
    return tuple(rows)


def _trim(tree: TokenTree | None, planned: PlannedRow) -> TokenTree:
    """Return the part of the tree that the plan has tokens for. An earlier plan may have requested a larger tree."""
    if tree is None or not planned.decide:
        return EMPTY_TREE
    return tree.truncated(planned.draft.max_nodes, planned.draft.max_depth)
