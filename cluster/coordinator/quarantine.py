"""Quarantine: sequences that may crash the target are sent alone, then without drafts.

Their request fails after too many crashes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from cluster.coordinator.clients.circuit_breaker import backoff
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.verification import VerifyRow

log = logging.getLogger(__name__)

MAX_LOSSES = 8
"""Number of lost calls without progress in between after which the request of a sequence in them fails."""
_FIRST_DEFERRAL_SECONDS = 0.25
_LONGEST_DEFERRAL_SECONDS = 2.0
"""Time for which others go first when the target is not ready for a sequence, in seconds; it doubles."""


class Quarantine:
    """Prevents a request that crashes the target every time from blocking all other requests."""

    def __init__(
        self,
        table: RequestTable,
        fail: Callable[[LiveRequest, TargetUnavailable], None],
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._fail = fail
        self._clock = clock

    def select(self, rows: tuple[VerifyRow, ...]) -> tuple[VerifyRow, ...]:
        """Return the rows to send: a quarantined row alone if there is one, so that a harmless one gets its verdict.

        While the target is not ready for the quarantined rows, the others are sent.
        """
        running, now = self._table.running, self._clock()
        quarantined = [row for row in rows if running[row.sequence_id].is_quarantined]
        if not quarantined:
            return rows
        ready = [row for row in quarantined if not running[row.sequence_id].is_deferred(now)]
        others = tuple(row for row in rows if not running[row.sequence_id].is_quarantined)
        return tuple(ready[:1]) or others or tuple(quarantined[:1])

    def defer(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Let others go first for a while: the target was not ready for these sequences."""
        for sequence_id in sequence_ids:
            if (live := self._table.running.get(sequence_id)) is not None:
                seconds = backoff(live.deferrals, _FIRST_DEFERRAL_SECONDS, _LONGEST_DEFERRAL_SECONDS)
                live.defer(self._clock() + seconds)

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
