"""The client of one drafter: returns valid proposals or none, and never raises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cluster.coordinator.clients.circuit_breaker import CircuitBreaker
from cluster.coordinator.clients.release_queue import ReleaseQueue
from cluster.coordinator.metrics import Metrics
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import ANY_TOKENS, DraftBudget, DraftRow, Evidence, NextTokens, Proposal, RowFaultCode
from cluster.core.errors import DrafterUnavailable, WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.ports import Drafter, LearnsElsewhere
from cluster.core.sequence import DraftRequest, Sequence
from cluster.core.verification import LearningStatus

log = logging.getLogger(__name__)

Proposals = dict[SequenceId, Proposal]

LATE_CALL_FACTOR = 20
"""A call that is late for its round continues in the background for this many times the configured timeout. The drafter
may be prefilling a long prompt, and later calls use the result."""
LATE_CALL_TOKENS = 512
"""Number of new tokens above which a late call may continue for a proportionally longer time."""


@dataclass(frozen=True, slots=True)
class ProposeResult:
    """The outcome of one call."""

    proposals: Proposals | None
    """`None` when the drafter failed."""
    seconds: float
    """How long the call took, in seconds."""
    lost_drafter: bool = False
    """Whether the drafter was lost while it had the call."""


ProposeCall = asyncio.Task[ProposeResult]


class DrafterClient:
    """Calls one drafter, and records how many tokens of each sequence the drafter has.

    A sequence is in at most one call at a time.
    """

    def __init__(self, drafter: Drafter, section: DraftSection, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._learning = drafter if isinstance(drafter, LearnsElsewhere) else None
        self._timeout = section.timeout_seconds
        self._metrics = metrics
        self._clock = clock
        self.breaker = CircuitBreaker(clock)
        self.drafted_tokens = 0
        """Number of drafted tokens that the drafter proposed."""
        self.call_seconds = 0.0
        """Total time of the calls to the drafter, in seconds."""
        self._releases = ReleaseQueue(drafter.release)
        self._synced_lens: dict[SequenceId, int] = {}
        self._refused: set[SequenceId] = set()
        self._to_release: set[SequenceId] = set()
        self._calls: dict[ProposeCall, frozenset[SequenceId]] = {}
        self._prefills: set[ProposeCall] = set()

    @property
    def learned(self) -> LearningStatus | None:
        """What the drafter had learned at its last answer; `None` where it does not learn."""
        return None if self._learning is None else self._learning.learned

    @property
    def is_calling(self) -> bool:
        """Whether any call is under way."""
        return bool(self._calls)

    def is_busy(self, sequence_id: SequenceId) -> bool:
        """Whether a call with this sequence is under way."""
        return any(sequence_id in ids for ids in self._calls.values())

    def refuses(self, sequence_id: SequenceId) -> bool:
        """Whether the drafter has answered that it cannot serve the sequence."""
        return sequence_id in self._refused

    def keeps(self, sequence_id: SequenceId) -> bool:
        """Whether the drafter was sent the sequence, and it was not released."""
        return sequence_id in self._synced_lens

    def unsynced(self, sequence: Sequence) -> int:
        """Number of tokens of the sequence that the drafter has not been sent."""
        return len(sequence) - self._synced_lens.get(sequence.id, 0)

    def start(
        self,
        requests: Iterable[DraftRequest],
        vocabulary_size: int,
        take_evidence: Callable[[SequenceId], tuple[Evidence, ...]] = lambda _: (),
    ) -> ProposeCall:
        """Start a call in the background, for sequences that are not busy.

        `take_evidence` returns what the target showed of a sequence since the last call.
        """
        rows = tuple(self._row(request, take_evidence(request.sequence.id)) for request in requests)
        call = asyncio.create_task(self._run(rows, vocabulary_size), name="propose")
        self._calls[call] = frozenset(row.sequence_id for row in rows)
        if not _wants_drafts(rows):
            self._prefills.add(call)
        call.add_done_callback(self._ended)
        return call

    def record_late(self) -> None:
        """Record that a call took longer than the configured timeout."""
        self.breaker.record_failure()
        log.warning("the drafter is late: the round continues without its drafts")

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended, once no call with them is under way."""
        for sequence_id in sequence_ids:
            self._refused.discard(sequence_id)
            if self._synced_lens.pop(sequence_id, None) is not None:
                self._to_release.add(sequence_id)
        for call in self._prefills:
            if self._calls[call] <= self._to_release:
                call.cancel()  # none of its sequences needs the prefill any more
        self._flush()

    async def leave(self, timeout_seconds: float) -> None:
        """Release all sequences, because the drafter is not used any more. See `close`."""
        self.release(tuple(self._synced_lens))
        await self.close(timeout_seconds)

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""
        calls = tuple(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._calls.clear()
        self._flush()
        await self._releases.close(timeout_seconds)

    def _row(self, request: DraftRequest, evidence: tuple[Evidence, ...]) -> DraftRow:
        sequence = request.sequence
        synced = self._synced_lens.setdefault(sequence.id, 0)
        start = sequence.start if synced == 0 else None
        known = NextTokens(sequence.forced, listed=sequence.following) if request.budget.max_nodes else ANY_TOKENS
        new = tuple(sequence.tokens[synced:])
        return DraftRow(sequence.id, len(sequence), new, request.budget, start, evidence, known)

    async def _run(self, rows: tuple[DraftRow, ...], vocabulary_size: int) -> ProposeResult:
        begun = self._clock()
        proposals: Proposals | None = None
        lost_drafter = False
        try:
            factor = LATE_CALL_FACTOR * max(1.0, sum(len(row.new_tokens) for row in rows) / LATE_CALL_TOKENS)
            answer = await self._drafter.propose(rows, self._timeout * factor)
            proposals = self._validated(rows, answer, vocabulary_size)
        except WorkerUnavailable as error:
            log.log(logging.WARNING if self.breaker.closed else logging.DEBUG, "the drafter is unavailable: %s", error)
            self.breaker.record_failure()
            lost_drafter = isinstance(error, DrafterUnavailable) and error.had_call
            if lost_drafter:
                self._synced_lens.update((row.sequence_id, 0) for row in rows if self.keeps(row.sequence_id))
        except Exception:
            log.exception("the drafter failed: the round continues without its drafts")
            self.breaker.record_failure()
        seconds = self._clock() - begun
        if proposals is not None and (seconds <= self._timeout or not _wants_drafts(rows)):  # a prefill may take longer
            self.breaker.record_success()
        self._metrics.drafter_worked(seconds)
        self.drafted_tokens += sum(len(proposal.tree) for proposal in (proposals or {}).values())
        self.call_seconds += seconds
        return ProposeResult(proposals, seconds, lost_drafter)

    def _validated(self, rows: tuple[DraftRow, ...], answer: Iterable[Proposal], vocabulary_size: int) -> Proposals:
        by_sequence = {proposal.sequence_id: proposal for proposal in answer}
        return {row.sequence_id: self._valid(row, by_sequence.get(row.sequence_id), vocabulary_size) for row in rows}

    def _valid(self, row: DraftRow, proposal: Proposal | None, vocabulary_size: int) -> Proposal:
        """Return the valid part of a proposal, and record how many tokens of the sequence the drafter has now."""
        if proposal is None or proposal.base_len != row.base_len:
            self._metrics.stale_proposal()
            return Proposal(row.sequence_id, row.base_len)
        self._note_synced(row, proposal)
        return checked(proposal, row.budget, vocabulary_size)

    def _note_synced(self, row: DraftRow, proposal: Proposal) -> None:
        if row.sequence_id not in self._synced_lens:
            return  # the sequence was released during the call
        if proposal.fault is None:
            self._synced_lens[row.sequence_id] = row.base_len
        elif proposal.fault.code is RowFaultCode.OUT_OF_SYNC:
            self._synced_lens[row.sequence_id] = 0
        elif proposal.fault.code is RowFaultCode.INVALID:
            log.warning("the drafter cannot serve %s: %s", row.sequence_id, proposal.fault.message)
            self._refused.add(row.sequence_id)

    def _ended(self, call: ProposeCall) -> None:
        self._calls.pop(call, None)
        self._prefills.discard(call)
        self._flush()

    def _flush(self) -> None:
        """Queue releases, except for sequences in a call under way: the call would create them again."""
        called = frozenset[SequenceId]().union(*self._calls.values()) if self._calls else frozenset()
        free = [sequence_id for sequence_id in self._to_release if sequence_id not in called]
        if free:
            self._releases.add(free)
            self._to_release.difference_update(free)


def _wants_drafts(rows: Iterable[DraftRow]) -> bool:
    """Whether a draft is wanted for any of the rows; otherwise the call only prefills."""
    return any(row.budget.max_nodes for row in rows)


def checked(proposal: Proposal, budget: DraftBudget, vocabulary_size: int) -> Proposal:
    """Return the proposal with at most the nodes of `budget`, or an empty one if its tree is unusable.

    A tree with a token outside the vocabulary is unusable.
    """
    tree = proposal.tree
    if proposal.fault is not None or not all(0 <= token < vocabulary_size for token in tree.tokens):
        return Proposal(proposal.sequence_id, proposal.base_len)
    if proposal.probabilities and len(proposal.probabilities) != len(tree):
        proposal = replace(proposal, probabilities=())
    if proposal.distributions and len(proposal.distributions) != len(tree):
        proposal = replace(proposal, distributions=())
    return proposal.subset(tree.within(budget.max_nodes, budget.max_depth))
