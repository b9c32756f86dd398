"""The stopwatch of one round."""

from __future__ import annotations

from collections.abc import Callable

from cluster.coordinator.observability.traces import RoundTimes


class RoundTimer:
    """Measures a round from its planning to its commit, and the step in it. All times are in seconds."""

    __slots__ = ("_begun", "_clock", "_proposing_at", "_step_begun", "_step_ended")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = self._proposing_at = self._step_begun = self._step_ended = clock()

    def propose_begins(self) -> None:
        """Record that drafts are asked for."""
        self._proposing_at = self._clock()

    def step_begins(self) -> None:
        """Record that the step is sent to the target."""
        self._step_begun = self._clock()

    def step_ends(self) -> None:
        """Record that the verdicts have arrived."""
        self._step_ended = self._clock()

    @property
    def step_seconds(self) -> float:
        """Time from sending the step to its verdicts."""
        return self._step_ended - self._step_begun

    def total_seconds(self) -> float:
        """Time since the round began."""
        return self._clock() - self._begun

    def times(self, *, proposed: bool) -> RoundTimes:
        """Return when the stages took place. The round ends now."""
        begun = self._proposing_at if proposed else None
        return RoundTimes(begun, self._step_begun, self._step_ended, self._clock())
