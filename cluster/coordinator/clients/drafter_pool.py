"""The pool of drafters: assigns sequences to drafters and calls all of them at once. The pool never raises."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from cluster.coordinator.clients.drafter import DrafterClient, Proposals, ProposeCall
from cluster.coordinator.metrics import DrafterStatus, Metrics
from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import NO_DRAFT
from cluster.core.evidence_store import EvidenceStore, largest_share
from cluster.core.ids import SequenceId
from cluster.core.ports import Drafter
from cluster.core.sequence import DraftRequest, Sequence
from cluster.core.verification import LearningStatus, StepResult

log = logging.getLogger(__name__)

PREFILL_TOKENS = 64
"""If a drafter lacks more tokens of a sequence than this, it prefills the sequence in the background first, so that the
prompt does not delay the proposals for others."""
MAX_PREFILL_TOKENS = 512
"""A prefill call takes sequences until it has this many tokens, so that a drafter can propose between prefill calls."""
MAX_EVIDENCE_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of hidden states in one call. A prefill call takes no sequence beyond them. Of the rows
of another call with more, those with the most lose their oldest."""
MAX_LOST_DRAFTERS = 2
"""Number of drafters lost while they had a sequence, without progress in between, after which it has no more drafts."""
_PREFILL_DECAY = 0.9
"""Factor on the measured prefill time and tokens with each further call."""


class ProposeCalls:
    """Calls to several drafters, started at once."""

    def __init__(
        self,
        requests: Mapping[SequenceId, DraftRequest],
        calls: Mapping[DrafterClient, ProposeCall],
        timeout: float,
        metrics: Metrics,
    ) -> None:
        self.requests = requests
        """The requested drafts, including those that were sent to no drafter."""
        self._calls = calls
        self._timeout = timeout
        self._metrics = metrics

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def done(self) -> bool:
        """Whether all calls have ended."""
        return all(call.done() for call in self._calls.values())

    @property
    def seconds(self) -> float:
        """Time of the slowest call that has ended, in seconds."""
        return max((call.result().seconds for call in self._calls.values() if _has_result(call)), default=0.0)

    async def wait(self, patience: float) -> None:
        """Return when all calls have ended, or after `patience` seconds, or after the configured timeout.

        Only the timeout opens circuit breakers.
        """
        if not self._calls:
            return
        await asyncio.wait(self._calls.values(), timeout=min(patience, self._timeout))
        for client, call in self._calls.items():
            if not call.done():
                self._metrics.drafter_fallback("late")
                if patience >= self._timeout:
                    client.record_late()

    def take(self) -> Proposals:
        """Return the proposals that have arrived."""
        proposals: Proposals = {}
        for call in self._calls.values():
            if _has_result(call):
                arrived = call.result().proposals
                if arrived is None:
                    self._metrics.drafter_fallback("failed")
                proposals.update(arrived or {})
        return proposals


def _has_result(call: ProposeCall) -> bool:
    return call.done() and not call.cancelled()


@dataclass(slots=True)
class _Suspect:
    """A sequence that lost drafters had, and that no drafter has answered since."""

    losses: int = 0
    had_budget: bool = False
    """Whether a draft was wanted of a lost drafter. A call that only prefills then does not clear it."""
    is_prefilled: bool = False
    """Whether a drafter has answered a call with it since the last loss."""

    def record_loss(self, *, wants_draft: bool) -> None:
        """Record the loss of a drafter that had the sequence in a call that wants a draft, or only prefills."""
        self.losses += 1
        self.had_budget |= wants_draft
        self.is_prefilled = False


class DrafterPool:
    """Assigns each new sequence to the least loaded drafter.

    The sequences of a drafter that fails or leaves move to the others. When its circuit breaker is due for a trial, the
    failed drafter gets one sequence. Once it answers, it gets its share of the sequences again.

    A drafter may die of a sequence, again and again. A sequence that a lost drafter had is sent alone until it is
    answered, so that it proves harmless, and to no drafter once `MAX_LOST_DRAFTERS` were lost with it.
    """

    def __init__(
        self, drafters: Iterable[Drafter], section: DraftSection, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._section = section
        self._metrics = metrics
        self._clock = clock
        self._by_name: dict[str, DrafterClient] = {}
        self._timeout = section.timeout_seconds
        self._vocabulary_size = 0
        self._assigned: dict[SequenceId, DrafterClient] = {}
        self._loads = Counter[DrafterClient]()
        self._prefilling: dict[DrafterClient, ProposeCall] = {}
        self._prefill_tokens = self._prefill_seconds_sum = 0.0
        self._evidence = EvidenceStore()
        self._suspects: dict[SequenceId, _Suspect] = {}
        for number, drafter in enumerate(drafters):
            self.join(str(number), drafter)

    def join(self, name: str, drafter: Drafter) -> None:
        """Add a drafter under a name that no other one has. It gets its share of the sequences from the next round on.

        Raises `ValueError` if the name is taken.
        """
        if name in self._by_name:
            raise ValueError(f"there is a drafter {name} already")
        self._by_name[name] = DrafterClient(drafter, self._section, self._metrics, self._clock)

    async def leave(self, name: str, timeout_seconds: float) -> None:
        """Remove a drafter; an unknown one is no error. Its sequences move to the others at once.

        Returns when its calls have ended and its sequences are released there, or after `timeout_seconds`.
        """
        client = self._by_name.pop(name, None)
        if client is None:
            return
        for sequence_id in [one for one, assigned in self._assigned.items() if assigned is client]:
            self._unassign(sequence_id)
        del self._loads[client]
        self._prefilling.pop(client, None)
        await client.leave(timeout_seconds)

    @property
    def _clients(self) -> Collection[DrafterClient]:
        return self._by_name.values()

    @property
    def available(self) -> int:
        """Number of drafters that rounds wait for."""
        return sum(client.breaker.closed for client in self._clients)

    @property
    def failed(self) -> int:
        """Number of drafters that have failed and not answered since."""
        return len(self._clients) - self.available

    @property
    def drafters(self) -> dict[str, DrafterStatus]:
        """What each drafter does, by its name."""
        return {
            name: DrafterStatus(client.breaker.closed, self._loads[client], client.drafted_tokens, client.call_seconds)
            for name, client in self._by_name.items()
        }

    @property
    def learned(self) -> LearningStatus | None:
        """What the drafters had learned at their last answers; `None` where none learns."""
        found = [learned for client in self._clients if (learned := client.learned) is not None]
        return LearningStatus.of_all(found) if found else None

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return not any(client.is_calling for client in self._clients)

    def start(self, vocabulary_size: int) -> None:
        """Set the size of the target's vocabulary, within which all drafted tokens must be."""
        self._vocabulary_size = vocabulary_size

    def keep_evidence(self, step: StepResult) -> None:
        """Keep what a step showed of each sequence until the next call to its drafter."""
        for verdict in step.verdicts:
            if verdict.evidence is not None and not self._is_barred(verdict.sequence_id):
                self._evidence.add(verdict.sequence_id, verdict.evidence)

    def propose(self, requests: Mapping[SequenceId, DraftRequest]) -> ProposeCalls:
        """Request drafts from each sequence's drafter, except for sequences that are busy, refused or not prefilled."""
        self._try_failed(requests.values())
        parts: dict[DrafterClient, list[DraftRequest]] = {}
        reasons: set[str] = set()
        for request in requests.values():
            sequence = request.sequence
            client = self._client_of(sequence)
            if self._is_barred(sequence.id):
                reasons.add("failed")
            elif client is None:
                reasons.add("busy" if any(client.is_calling for client in self._clients) else "open")
            elif client.is_busy(sequence.id):
                reasons.add("busy")
            elif client.unsynced(sequence) > PREFILL_TOKENS:
                reasons.add("prefill")
            elif not client.refuses(sequence.id):
                parts.setdefault(client, []).append(request)
        for reason in sorted(reasons):
            self._metrics.drafter_fallback(reason)
        calls = {client: self._start(client, self._one_suspect(part)) for client, part in parts.items()}
        return ProposeCalls(requests, calls, self._timeout, self._metrics)

    def is_prefilled(self, sequence: Sequence) -> bool:
        """Whether the sequence's drafter lacks at most `PREFILL_TOKENS` tokens, so that it can propose a draft."""
        client = self._client_of(sequence)
        return client is not None and client.unsynced(sequence) <= PREFILL_TOKENS

    def prefill(self, sequences: Iterable[Sequence]) -> ProposeCalls:
        """Let drafters prefill, in the background, sequences that are too many tokens ahead of them.

        So are sequences of which a drafter lacks the hidden states of too many tokens. A long prompt's come in pieces,
        because those of all its tokens would be too many to keep.
        """
        requests = {sequence.id: DraftRequest(sequence, NO_DRAFT) for sequence in sequences}
        self._try_failed(requests.values())
        self._prefilling = {client: call for client, call in self._prefilling.items() if not call.done()}
        parts: dict[DrafterClient, list[DraftRequest]] = {}
        tokens, sizes = Counter[DrafterClient](), Counter[DrafterClient]()
        for request in requests.values():
            sequence = request.sequence
            client = self._client_of(sequence)
            lacking = 0 if client is None else max(client.unsynced(sequence), self._evidence.positions(sequence.id))
            if client is None or lacking <= PREFILL_TOKENS or self._is_barred(sequence.id):
                continue
            if client.is_busy(sequence.id) or client.refuses(sequence.id):
                continue
            size = sizes[client] + self._evidence.size(sequence.id)
            is_full = tokens[client] >= MAX_PREFILL_TOKENS or size > MAX_EVIDENCE_BYTES
            if client not in self._prefilling and not is_full:
                tokens[client] += lacking
                sizes[client] = size
                parts.setdefault(client, []).append(request)
        calls = {client: self._start(client, self._one_suspect(part)) for client, part in parts.items()}
        for client, call in calls.items():
            call.add_done_callback(partial(self._measure_prefill, tokens[client]))
        self._prefilling |= calls
        return ProposeCalls(requests, calls, self._timeout, self._metrics)

    def prefill_seconds(self, sequence: Sequence) -> float:
        """Expected time to prefill the sequence, in seconds; 0 when it needs none or nothing was measured."""
        client = self._client_of(sequence)
        unsynced = 0 if client is None else client.unsynced(sequence)
        if unsynced <= PREFILL_TOKENS or not self._prefill_tokens:
            return 0.0
        return unsynced * self._prefill_seconds_sum / self._prefill_tokens

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended."""
        sequence_ids = tuple(sequence_ids)
        for sequence_id in sequence_ids:
            self._unassign(sequence_id)
            self._evidence.take(sequence_id)
            self._suspects.pop(sequence_id, None)
        for client in self._clients:
            client.release(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""
        await asyncio.gather(*(client.close(timeout_seconds) for client in self._clients))

    def _start(self, client: DrafterClient, requests: Iterable[DraftRequest]) -> ProposeCall:
        requests = tuple(requests)
        sizes = (self._evidence.size(request.sequence.id) for request in requests)
        share = largest_share(sizes, MAX_EVIDENCE_BYTES)
        call = client.start(requests, self._vocabulary_size, lambda name: self._evidence.take(name, share))
        call.add_done_callback(partial(self._judge, client, requests))
        return call

    def _is_barred(self, sequence_id: SequenceId) -> bool:
        """Whether the sequence has no more drafts, because too many drafters were lost with it."""
        suspect = self._suspects.get(sequence_id)
        return suspect is not None and suspect.losses >= MAX_LOST_DRAFTERS

    def _one_suspect(self, requests: list[DraftRequest]) -> list[DraftRequest]:
        """Return the first of the requests that a drafter may die of, alone; all if there is none."""
        return next(([one] for one in requests if self._is_suspect(one)), requests)

    def _is_suspect(self, request: DraftRequest) -> bool:
        suspect = self._suspects.get(request.sequence.id)
        return suspect is not None and (request.budget.max_nodes > 0 or not suspect.is_prefilled)

    def _judge(self, client: DrafterClient, requests: Collection[DraftRequest], call: ProposeCall) -> None:
        """Record that the drafter was lost with these sequences, or that it has answered."""
        if not _has_result(call):
            return
        for request in requests:
            sequence_id, wants_draft = request.sequence.id, request.budget.max_nodes > 0
            suspect = self._suspects.get(sequence_id)
            if call.result().lost_drafter and client.keeps(sequence_id):
                suspect = self._suspects.setdefault(sequence_id, _Suspect())
                suspect.record_loss(wants_draft=wants_draft)
                if suspect.losses == MAX_LOST_DRAFTERS:
                    log.error("%s: %d drafters were lost with it; it has no more drafts", sequence_id, suspect.losses)
                    self._evidence.take(sequence_id)
            elif suspect is not None and call.result().proposals is not None and not self._is_barred(sequence_id):
                suspect.is_prefilled = True
                if wants_draft or not suspect.had_budget:
                    del self._suspects[sequence_id]

    def _measure_prefill(self, tokens: int, call: ProposeCall) -> None:
        if _has_result(call) and call.result().proposals is not None:
            self._prefill_tokens = self._prefill_tokens * _PREFILL_DECAY + tokens
            self._prefill_seconds_sum = self._prefill_seconds_sum * _PREFILL_DECAY + call.result().seconds

    def _client_of(self, sequence: Sequence) -> DrafterClient | None:
        """Return the drafter that serves the sequence, or `None` while no drafter is available.

        It may have refused the sequence if all of them have.
        """
        available = [client for client in self._clients if client.breaker.closed]
        if not available:
            return None
        willing = [client for client in available if not client.refuses(sequence.id)] or available
        assigned = self._assigned.get(sequence.id)
        least = min(willing, key=self._loads.__getitem__)
        if assigned not in willing or self._loads[assigned] > self._loads[least] + 1:
            self._unassign(sequence.id)
            self._loads[least] += 1
            self._assigned[sequence.id] = assigned = least
        return assigned

    def _try_failed(self, requests: Collection[DraftRequest]) -> None:
        """Start a background trial call to each failed drafter whose circuit breaker is due.

        The call has the sequences of which the drafter lacks the least, up to `MAX_PREFILL_TOKENS` tokens: the drafter
        must answer in time. One sequence is enough where other drafters serve the rest.
        """
        for client in self._clients:
            if client.breaker.closed or client.is_calling or not requests or not client.breaker.due():
                continue
            served = [
                request
                for request in requests
                if not client.refuses(request.sequence.id) and not self._is_barred(request.sequence.id)
            ]
            harmless = [request for request in served if request.sequence.id not in self._suspects]
            served = harmless or served[:1]
            served.sort(key=lambda request: client.unsynced(request.sequence))
            lacking = accumulate(client.unsynced(request.sequence) for request in served)
            most = 1 if len(self._by_name) > 1 else max(1, sum(tokens <= MAX_PREFILL_TOKENS for tokens in lacking))
            if served:
                self._start(client, served[:most])

    def _unassign(self, sequence_id: SequenceId) -> None:
        assigned = self._assigned.pop(sequence_id, None)
        if assigned is not None:
            self._loads[assigned] -= 1
