"""Probe: while speculation does not pay, draft for a few sequences in the background and compare with the target.

The drafts of a probe are not verified, and no round waits for a drafter in another process. The tokens that the target
decides without drafts are compared with the probe. The comparison shows when speculation pays again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.coordinator.clients.draft_source import DraftCalls, DraftSource
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.drafting import DraftBudget
from cluster.core.sequence import DraftRequest
from cluster.speculation.controller import EVIDENCE_ROUNDS, REST_ROUNDS, SpeculationController

TIME_SHARE = 0.01
"""Largest share of the time that drafters spend on probes; prefills for probes get the same share."""
LEAST_SECONDS = 0.5e-3
"""A background call counts at least as long, in seconds: the coordinator also works for it."""
PROBED_SEQUENCES = 4
"""Sequences in one probe."""
FIRST_PAUSE_FACTOR = 1 / 16
"""Factor on the pause between the first probes, when nothing is known."""
FIRST_PAUSE_FACTOR_ON_TARGET = 1 / 2
"""The same for drafts on the target: a step waits for a probe there."""
NEW_SEQUENCE_FACTOR, NEW_SEQUENCE_FACTOR_ON_TARGET = 1.0, 2.0
"""Largest factor on the pause once there are sequences of which nothing is known."""
MAX_PAUSE_FACTOR = 8.0
"""Largest factor on the pause, which doubles while speculation does not pay."""
OVERDUE_ROUNDS = 64
"""Rounds after which a probe that is due takes any sequence, because all answers are short."""
_ROUND_RATE = 0.2
"""Share of a round's deviation that goes into the mean time of a round."""
_SHORTEST_ROUND = 1e-6
"""Fewest seconds of a round in that mean, where it divides."""
_LONGEST_ROUND = 1.0
"""Most seconds that one round counts in that mean."""


@dataclass(slots=True)
class _DutyCycle:
    """Keeps background calls within `TIME_SHARE`: after each call, a pause in proportion to its time."""

    calls: DraftCalls | None = None
    """The calls under way."""
    _resume_at: float = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether calls may start, if `now` is the time."""
        return self.calls is None and now >= self._resume_at

    def seconds_left(self, now: float) -> float:
        """Seconds until calls may start."""
        return max(0.0, self._resume_at - now)

    def take_ended(self, now: float, pause_factor: float) -> DraftCalls | None:
        """The calls under way if they have ended; the pause starts now."""
        ended = self.calls
        if ended is None or not ended.done:
            return None
        self.calls = None
        self._resume_at = now + pause_factor * max(ended.seconds, LEAST_SECONDS) / TIME_SHARE
        return ended


class BackgroundProbes:
    """Probes the sequences that have no drafts, one group after another."""

    def __init__(
        self,
        pool: DraftSource,
        controller: SpeculationController,
        max_draft: DraftBudget,
        clock: Callable[[], float],
        *,
        is_colocated: bool = False,
    ) -> None:
        self._pool = pool
        self._controller = controller
        self._max_draft = max_draft
        self._clock = clock
        self._probes, self._prefills = _DutyCycle(), _DutyCycle()
        self._pause_factor = FIRST_PAUSE_FACTOR_ON_TARGET if is_colocated else FIRST_PAUSE_FACTOR
        self._new_factor = NEW_SEQUENCE_FACTOR_ON_TARGET if is_colocated else NEW_SEQUENCE_FACTOR
        self._next = 0
        self._least_decoded = EVIDENCE_ROUNDS if is_colocated else 0
        """Tokens of an answer before its first probe: a drafter on the target was not shown the prompt."""
        self._last_round_at = clock()
        self._round_seconds = 0.0
        self._rounds = 1
        self._finds_none = False

    @property
    def are_near(self) -> bool:
        """Whether a probe may start `EVIDENCE_ROUNDS` rounds after a rest, so that the drafter should know those."""
        return self._probes.allows(self._clock() + (EVIDENCE_ROUNDS + REST_ROUNDS) * self._round_seconds)

    @property
    def idle_rounds(self) -> float:
        """In how many rounds the next probe is due. 0 while a call is under way or was not collected."""
        if self._probes.calls is not None or self._prefills.calls is not None:
            return 0.0
        if self._finds_none:
            return float("inf")
        return self._probes.seconds_left(self._clock()) / max(self._round_seconds, _SHORTEST_ROUND)

    def pass_rounds(self, rounds: int) -> None:
        """Tell that `rounds` rounds have passed without `collect`."""
        self._rounds += rounds

    def expect_new_sequences(self) -> None:
        """Shorten the pause, because nothing is known of the new sequences."""
        self._pause_factor = min(self._new_factor, self._pause_factor)

    def start(self, candidates: Sequence[LiveSequence]) -> None:
        """Draft for some of the candidates, or let a drafter prefill one of them.

        Prefilling a long prompt takes a drafter many times as long as a draft, so the sequences that a drafter already
        has are probed repeatedly.
        """
        if not self._probes.allows(self._clock() - OVERDUE_ROUNDS * self._round_seconds):
            candidates = [live for live in candidates if _decoded(live) >= self._least_decoded]
        self._finds_none = not candidates
        if not candidates or not self._pool.is_idle:
            return
        first = self._next % len(candidates)
        self._next += PROBED_SEQUENCES
        candidates = [*candidates[first:], *candidates[:first]]
        prefilled = [live for live in candidates if self._pool.is_prefilled(live.sequence)]
        if prefilled and self._probes.allows(self._clock()):
            calls = self._pool.probe(
                {
                    live.id: DraftRequest(live.sequence, live.largest_draft(self._max_draft))
                    for live in prefilled[:PROBED_SEQUENCES]
                }
            )
            if calls:
                self._probes.calls = calls
        elif len(prefilled) < len(candidates) and self._prefills.allows(self._clock()):
            unknown = next(live for live in candidates if live not in prefilled)
            calls = self._pool.prefill((unknown.sequence,))
            if calls:
                self._prefills.calls = calls

    def collect(self) -> None:
        """Pass the proposals that have arrived to the controller, and pause in proportion to the time they took.

        Call it once per round, except in those of `pass_rounds`.
        """
        now = self._clock()
        seconds = (now - self._last_round_at) / self._rounds
        self._round_seconds += _ROUND_RATE * (min(seconds, _LONGEST_ROUND) - self._round_seconds)
        self._last_round_at, self._rounds = now, 1
        self._prefills.take_ended(now, max(1.0, self._pause_factor))
        probe = self._probes.take_ended(now, self._pause_factor)
        if probe is None:
            return
        proposals = probe.take()
        for sequence_id, proposal in proposals.items():
            self._controller.observe_probe(probe.requests[sequence_id], proposal)
        if proposals:
            self._controller.observe_probe_latency(len(probe.requests), probe.depth, probe.seconds)
        self._pause_factor = min(MAX_PAUSE_FACTOR, self._pause_factor * 2) if self._controller.is_idle else 1.0


def _decoded(live: LiveSequence) -> int:
    return len(live.sequence) - live.sequence.prompt_len
