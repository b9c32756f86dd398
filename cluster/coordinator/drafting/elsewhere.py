"""Drafts of drafters in processes of their own: asked for before a step, and waited for.

With alternating halves, the rows of the next round are drafted for while the target computes this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.coordinator.clients.drafter import Proposals
from cluster.coordinator.clients.drafter_pool import DrafterPool, ProposeCalls
from cluster.coordinator.drafting.draft_source import Proposed, deepest, draft_requests
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core import sequence as core
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow, WantedDrafts
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepResult, VerifyRow
from cluster.speculation.observation import DraftSample, DraftTime, Probe, RoundDrafts


class DraftsElsewhere:
    """Drafts of a pool of drafters. It is a `DraftSource`."""

    def __init__(
        self,
        pool: DrafterPool,
        running: Mapping[SequenceId, LiveSequence],
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        alternates: bool = False,
    ) -> None:
        """`alternates` turns alternating halves on."""
        self._pool = pool
        self._running = running
        self._metrics = metrics
        self._clock = clock
        self._alternates = alternates
        self._next: ProposeCalls | None = None
        """The calls for the next round, with alternating halves."""
        self._probe: ProposeCalls | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._pool.is_idle

    @property
    def wants_following(self) -> bool:
        """Whether any drafter is available: it is sent what grammars allow next."""
        return self._pool.available > 0

    def start(self, vocabulary_size: int) -> None:
        """Keep the size of the target's vocabulary, within which all drafted tokens must be."""
        self._pool.start(vocabulary_size)

    def plan_with(self, wanted: WantedDrafts) -> WantedDrafts:
        """The wanted trees: drafts are for the same round."""
        return wanted

    def split(self, plan: Plan) -> tuple[Plan, Plan]:
        """Split the rows into those of this round and of the next with alternating halves; prompts are in this one.

        While no drafter is available, all rows are: halves without drafts would take twice as many steps.
        """
        alternates = self._alternates and self._pool.available > 0
        drafted = [row for row in plan.rows if row.wants_draft] if alternates else []
        if len(drafted) < 2:
            return plan, Plan()
        ready = {} if self._next is None else self._next.requests
        now = [row.sequence_id for row in drafted if row.sequence_id in ready] or [
            row.sequence_id for row in drafted[: len(drafted) // 2]
        ]
        later = {row.sequence_id for row in drafted}.difference(now)
        first = tuple(row for row in plan.rows if row.sequence_id not in later)
        return replace(plan, rows=first), Plan(rows=tuple(row for row in plan.rows if row.sequence_id in later))

    async def propose(self, rows: Iterable[PlannedRow], patience: Callable[[int, int], float]) -> Proposed:
        """Wait for the drafts of the rows that want any, from the calls under way if they are for these rows."""
        begun = self._clock()
        rows = tuple(rows)
        calls, self._next = self._next, None
        if calls is None or not any(row.wants_draft and row.sequence_id in calls.requests for row in rows):
            calls = self._call(rows)
        if calls is None:
            return Proposed()
        asked, depth = len(calls.requests), deepest(calls.requests)
        await calls.wait(patience(asked, depth))
        proposals: Proposals = {}
        for sequence_id, proposal in calls.take().items():
            live = self._running.get(sequence_id)
            if live is None:
                continue
            if proposal.base_len == len(live.sequence):
                proposals[sequence_id] = proposal
            elif proposal.tree:  # the client of a drafter has counted those that it emptied
                self._metrics.stale_proposal()
        waited = self._clock() - begun
        is_sample = proposals or not calls.done  # an immediate refusal does not show how long proposals take
        sample = DraftSample(len(proposals) or asked, depth, waited) if is_sample else None
        return Proposed(calls.requests, proposals, waited, sample)

    def next_budgets(self, plan: Plan, probed: Collection[SequenceId]) -> Mapping[SequenceId, DraftBudget]:  # noqa: ARG002
        """None: the target does not draft."""
        return {}

    def work_during_step(self, later: Plan, unprefilled: Iterable[core.Sequence]) -> None:
        """Draft for the other half, and let drafters prefill sequences, while the target computes."""
        self._next = self._call(later.rows)
        self._pool.prefill(unprefilled)

    def receive(self, rows: Sequence[VerifyRow], step: StepResult, drafts: RoundDrafts) -> DraftTime:  # noqa: ARG002
        """Keep the evidence of a step until the drafters' next calls, and show what they have learned."""
        self._pool.keep_evidence(step)
        if (learned := self._pool.learned) is not None:
            self._metrics.learned(learned)
        return DraftTime(drafts.waited, has_asked=drafts.waited > 0.0)

    def probe(self, requests: Mapping[SequenceId, DraftRequest]) -> bool:
        """Ask drafters for drafts in the background."""
        self._probe = self._pool.propose(requests) or None
        return self._probe is not None

    def take_probe(self) -> Probe | None:
        """The probe, once after all its calls have ended."""
        calls = self._probe
        if calls is None or not calls.done:
            return None
        self._probe = None
        return Probe(calls.requests, calls.take(), calls.seconds)

    def prefill_seconds(self, sequence: core.Sequence) -> float:
        """Expected time in which the sequence's drafter prefills it, in seconds."""
        return self._pool.prefill_seconds(sequence)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended on all drafters."""
        self._pool.release(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""
        await self._pool.close(timeout_seconds)

    def _call(self, rows: Iterable[PlannedRow]) -> ProposeCalls | None:
        requests = draft_requests(rows, self._running)
        return self._pool.propose(requests) if requests else None
