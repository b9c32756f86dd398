"""Commit: add the tokens of each verdict to its sequence, and collect the commits for the readers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.drafting import RowFaultCode
from cluster.core.errors import InvalidRequest, PilotfishError, WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.request import Commit
from cluster.core.verification import StepResult, Verdict, VerifyRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of committing the verdicts of one step."""

    commits: list[tuple[LiveRequest, Commit]] = field(default_factory=list)
    """Commits for the readers, in order."""
    decided: list[Commit] = field(default_factory=list)
    """What each verdict added to its sequence."""
    faults: dict[SequenceId, RowFaultCode] = field(default_factory=dict)
    """Rows that must be repaired before they are sent again."""


class Committer:
    """Commits verdicts. A wrong row affects only its own request."""

    def __init__(self, table: RequestTable, fail: Callable[[LiveRequest, PilotfishError], None]) -> None:
        self._table = table
        self._fail = fail

    def commit(self, rows: tuple[VerifyRow, ...], step: StepResult) -> CommitResult:
        """Commit the verdicts of a step, row by row."""
        result = CommitResult()
        verdicts = {verdict.sequence_id: verdict for verdict in step.verdicts}
        for row in rows:
            live = self._table.running.get(row.sequence_id)
            request = None if live is None else self._table.request_of(live)
            if live is None or request is None:
                continue  # the sequence ended while the target computed
            try:
                fault = self._commit(request, live, row, verdicts.get(row.sequence_id), result)
            except Exception:
                log.exception("request %s failed", request.id)
                self._fail(request, WorkerUnavailable("the request failed because of an internal error"))
                continue
            if fault is not None:
                result.faults[row.sequence_id] = fault
        return result

    def _commit(
        self,
        request: LiveRequest,
        live: LiveSequence,
        row: VerifyRow,
        verdict: Verdict | None,
        result: CommitResult,
    ) -> RowFaultCode | None:
        """Commit one verdict. Returns the fault to repair, if any."""
        if verdict is None or not is_valid(row, verdict):
            log.error("the target's verdict on %s does not match its row: the row is sent again", row.sequence_id)
            return RowFaultCode.OUT_OF_SYNC
        if verdict.fault is not None and verdict.fault.code is RowFaultCode.INVALID:
            message = verdict.fault.message
            field = "grammar" if message.startswith("grammar: ") else "prompt"
            self._fail(request, InvalidRequest(field, message, "what the target can compute"))
            return None
        if verdict.fault is None:
            live.record_progress(row, verdict.accepted)
        commit = live.sequence.commit(verdict, row.accepted_origins(verdict.tokens[: verdict.accepted]))
        if commit is not None:
            if request.request.returns_drafts:
                verified = row.tree.first(verdict.drafted)  # the target may leave out the last nodes
                commit = replace(commit, tree=verified, tree_origins=row.node_origins[: len(verified)])
            self._advance(request, live, commit, result)
        return None if verdict.fault is None else verdict.fault.code

    def _advance(self, request: LiveRequest, live: LiveSequence, commit: Commit, result: CommitResult) -> None:
        """Pass a commit to the request's decoding strategy, and start the sequences that it returns."""
        result.decided.append(commit)
        step = request.strategy.advance(live.slot, commit)
        if step.sequences:
            self._table.start(request, step.sequences)
        if commit.finish is not None:
            self._table.finish(live)
        for one in step.commits:
            result.commits.append((request, one))


def is_valid(row: VerifyRow, verdict: Verdict) -> bool:
    """Whether the verdict matches its row: the same length, and as many tokens as the tree allows."""
    if verdict.base_len != row.base_len:
        return False
    if verdict.fault is not None:
        return True
    fewest, most = (1, 1 + row.tree.depth()) if row.decide else (0, 0)
    return fewest <= len(verdict.tokens) <= most
