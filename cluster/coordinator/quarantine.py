"""Quarantine: sequences that may crash the target are sent alone, then without drafts.

Their request fails after too many crashes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.verification import VerifyRow

log = logging.getLogger(__name__)

MAX_LOSSES = 8
"""Number of lost calls without progress in between after which the request of a sequence in them fails."""


class Quarantine:
    """Prevents a request that crashes the target every time from blocking all other requests."""

    def __init__(self, table: RequestTable, fail: Callable[[LiveRequest, TargetUnavailable], None]) -> None:
        self._table = table
        self._fail = fail

    def select(self, rows: tuple[VerifyRow, ...]) -> tuple[VerifyRow, ...]:
        """Return the rows to send: a quarantined row alone if there is one, so that a harmless one gets its verdict."""
        running = self._table.running
        quarantined = next((row for row in rows if running[row.sequence_id].is_quarantined), None)
        return rows if quarantined is None else (quarantined,)

    def record_loss(self, rows: Mapping[SequenceId, VerifyRow | None]) -> None:
        """Record that a call with these sequences was lost, with their rows or without: it computed none."""
        for sequence_id, row in rows.items():
            live = self._table.running.get(sequence_id)
            if live is None or live.record_loss(row) < MAX_LOSSES:
                continue
            log.error("request %s: %d calls were lost with it at the same place", live.request_id, MAX_LOSSES)
            request = self._table.request_of(live)
            if request is not None:
                error = TargetUnavailable(f"the target was lost {MAX_LOSSES} times in a row on this request")
                self._fail(request, error)  # unlike `NotReady`, it does not ask to send the request elsewhere
