"""Probes: while speculation is suspended, draft for a few sequences in the background and compare with the target.

The drafts of a probe are not verified, and no round waits for a drafter in another process. The tokens that the target
decides without drafts are compared with the probe. The comparison shows when speculation saves time again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cluster.coordinator.clients.drafter_pool import DrafterPool, ProposeCalls
from cluster.coordinator.drafting.draft_source import DraftSource
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest
from cluster.speculation.constants import (
    EVIDENCE_ROUNDS,
    FIRST_PROBE_PAUSE,
    FIRST_PROBE_PAUSE_ON_TARGET,
    LONGEST_ROUND,
    MAX_PROBE_PAUSE,
    MIN_PROBE_SECONDS,
    NEW_SEQUENCE_PAUSE,
    NEW_SEQUENCE_PAUSE_ON_TARGET,
    OVERDUE_ROUNDS,
    PROBE_TIME_SHARE,
    PROBED_SEQUENCES,
    ROUND_RATE,
)
from cluster.speculation.observation import Probe, RoundRecord


@dataclass(slots=True)
class _DutyCycle:
    """Keeps background work within `PROBE_TIME_SHARE`: after each call, a pause in proportion to its time."""

    is_working: bool = False
    """Whether a call is under way."""
    _resume_at: float = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether a call may start, if `now` is the time."""
        return not self.is_working and now >= self._resume_at

    def end(self, now: float, seconds: float, pause_factor: float) -> None:
        """Record that the call under way has ended after `seconds` seconds. The pause starts now."""
        self.is_working = False
        self._resume_at = now + pause_factor * max(seconds, MIN_PROBE_SECONDS) / PROBE_TIME_SHARE


class BackgroundProbes:
    """Probes the sequences that have no drafts, one group after another."""

    def __init__(
        self,
        source: DraftSource,
        largest: DraftBudget,
        clock: Callable[[], float],
        *,
        pool: DrafterPool | None,
    ) -> None:
        """`largest` is the largest tree of a probe. `pool` is set if drafters elsewhere must prefill sequences."""
        self._source = source
        self._largest = largest
        self._clock = clock
        self._pool = pool
        self._probes, self._prefills = _DutyCycle(), _DutyCycle()
        self._prefill: ProposeCalls | None = None
        self._pause_factor = FIRST_PROBE_PAUSE if pool is not None else FIRST_PROBE_PAUSE_ON_TARGET
        self._new_factor = NEW_SEQUENCE_PAUSE if pool is not None else NEW_SEQUENCE_PAUSE_ON_TARGET
        self._chosen: dict[SequenceId, int] = {}
        """Sequences of the next probe, whose steps a drafter on the target reads, and their lengths when it began."""
        self._due_rounds = OVERDUE_ROUNDS
        """Rounds with candidates in which a probe of a drafter on the target was due and has not begun. The first probe
        takes any sequence, because a drafter begins with drafts for all."""
        self._next = 0
        self._round_seconds = 0.0
        """Mean time of recent rounds, in seconds."""

    def upcoming(self, candidates: Iterable[LiveSequence]) -> Collection[SequenceId]:
        """The sequences of the next probe of a drafter on the target, if it may start within `EVIDENCE_ROUNDS` rounds.

        The drafter reads their steps until then, and no others: each sequence that it reads makes a step longer.
        """
        now = self._clock()
        if self._pool is not None or not self._probes.allows(now + EVIDENCE_ROUNDS * self._round_seconds):
            self._chosen = {}
            return ()
        known = {live.id: live for live in candidates}
        self._due_rounds = self._due_rounds + bool(known) if self._probes.allows(now) else 0
        self._chosen = {name: length for name, length in self._chosen.items() if name in known}
        others = [live for name, live in known.items() if name not in self._chosen]
        others = [live for live in others if self._is_overdue or _lasts(live)]
        for live in self._rotated(others)[: PROBED_SEQUENCES - len(self._chosen)]:
            self._chosen[live.id] = len(live.sequence)
        return self._chosen

    def expect_new_sequences(self) -> None:
        """Shorten the pause, because nothing is known of the new sequences."""
        self._pause_factor = min(self._new_factor, self._pause_factor)

    def take(self, record: RoundRecord | None, *, is_idle: bool) -> Probe | None:
        """The probe, once after it has ended. A pause in proportion to its time begins.

        The pause doubles each time while speculation costs time (`is_idle`). `record` is of the round before.
        """
        now = self._clock()
        if record is not None:
            self._round_seconds += ROUND_RATE * (min(record.seconds, LONGEST_ROUND) - self._round_seconds)
        if self._prefill is not None and self._prefill.done:
            self._prefills.end(now, self._prefill.seconds, max(1.0, self._pause_factor))
            self._prefill = None
        probe = self._source.take_probe() if self._probes.is_working else None
        if probe is not None:
            self._probes.end(now, probe.seconds, self._pause_factor)
            self._pause_factor = min(MAX_PROBE_PAUSE, self._pause_factor * 2) if is_idle else 1.0
        return probe

    def start(self, candidates: Iterable[LiveSequence]) -> None:
        """Draft for some of the candidates, or let a drafter prefill one of them.

        Prefilling a long prompt takes a drafter many times as long as a draft, so the sequences that a drafter already
        has are probed repeatedly.
        """
        now = self._clock()
        if not (self._probes.allows(now) or (self._pool is not None and self._prefills.allows(now))):
            return
        candidates = self._rotated([live for live in candidates if self._pool is not None or self._is_read(live)])
        if not candidates or not self._source.is_idle:
            return
        self._next += PROBED_SEQUENCES
        pool = self._pool
        prefilled = [live for live in candidates if pool is None or pool.is_prefilled(live.sequence)]
        if prefilled and self._probes.allows(now):
            requests = {
                live.id: DraftRequest(live.sequence, live.largest_draft(self._largest))
                for live in prefilled[:PROBED_SEQUENCES]
            }
            self._probes.is_working = self._source.probe(requests)
        elif pool is not None and len(prefilled) < len(candidates) and self._prefills.allows(now):
            unknown = next(live for live in candidates if live not in prefilled)
            self._prefill = pool.prefill((unknown.sequence,)) or None
            self._prefills.is_working = self._prefill is not None

    def _is_read(self, live: LiveSequence) -> bool:
        """Whether a drafter on the target has read the steps of a sequence, or enough of them unless one is overdue."""
        first = self._chosen.get(live.id)
        return first is not None and (self._is_overdue or len(live.sequence) - first >= EVIDENCE_ROUNDS)

    @property
    def _is_overdue(self) -> bool:
        """Whether a probe takes any sequence, because answers have been too short for so long."""
        return self._due_rounds > OVERDUE_ROUNDS

    def _rotated(self, candidates: list[LiveSequence]) -> list[LiveSequence]:
        """The candidates, beginning behind those of the last probe."""
        first = self._next % max(1, len(candidates))
        return candidates[first:] + candidates[:first]


def _lasts(live: LiveSequence) -> bool:
    """Whether the sequence may decode long enough for a drafter to read `EVIDENCE_ROUNDS` of its steps first."""
    return live.sequence.remaining > EVIDENCE_ROUNDS
