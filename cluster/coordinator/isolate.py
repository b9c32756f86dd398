"""Whom to blame when the target is lost again and again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from cluster.coordinator.output_stream import Stream
from cluster.coordinator.running import Lane
from cluster.core.errors import NotReady
from cluster.core.ids import SequenceId
from cluster.core.verification import VerifyRow

log = logging.getLogger(__name__)

MOST_LOSSES = 8
"""Calls in a row that may be lost with a sequence in them before its request is given up."""


class Suspects:
    """A request that takes the target down every time must not take it from all others for ever."""

    def __init__(self, fail: Callable[[Stream, NotReady], None]) -> None:
        self._fail = fail

    @staticmethod
    def is_suspect(lane: Lane) -> bool:
        """Whether it was there in so many losses that it is sent alone, and not opened but sent from the start."""
        return lane.losses >= MOST_LOSSES // 2

    def isolate(self, rows: tuple[VerifyRow, ...], running: Mapping[SequenceId, Lane]) -> tuple[VerifyRow, ...]:
        """While calls are being lost, one suspected sequence at a time: whoever is innocent then gets its verdict."""
        suspects = [row for row in rows if self.is_suspect(running[row.sequence_id])]
        return tuple(suspects[:1]) or rows

    def lost(self, lanes: Iterable[Lane | None]) -> None:
        """A call was lost with these in it; some may have left since."""
        for lane in lanes:
            if lane is None:
                continue
            lane.losses += 1
            if lane.losses >= MOST_LOSSES:
                log.error("request %s: %d calls in a row were lost with it", lane.stream.id, MOST_LOSSES)
                error = NotReady(f"the target was lost {MOST_LOSSES} times in a row on this request")
                self._fail(lane.stream, error)
