"""The drafts of a drafter on the target: requested with one step's rows, received with its verdicts.

No call is made for them. A draft is used in the next round, or dropped when the sequence has another length by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.coordinator.clients.draft_source import Proposals
from cluster.coordinator.clients.proposal_check import checked
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest, Sequence
from cluster.core.verification import StepResult, VerifyRow


class TargetDraftCalls:
    """Drafts that have arrived, or that the next step brings."""

    def __init__(self, requests: Mapping[SequenceId, DraftRequest], proposals: Proposals, *, done: bool) -> None:
        self.requests = requests
        self.done = done
        """Whether the step that brings the drafts has ended."""
        self.seconds = 0.0
        """Time that the target spent on the drafts, in seconds."""
        self._proposals = proposals

    def __bool__(self) -> bool:
        return bool(self.requests)

    @property
    def depth(self) -> int:
        """Depth of the deepest requested tree, in tokens."""
        return max((request.budget.max_depth for request in self.requests.values()), default=0)

    async def wait(self, patience: float) -> None:
        """Return at once: drafts come with verdicts."""

    def take(self) -> Proposals:
        """Return the proposals that have arrived."""
        return self._proposals

    def end(self, proposals: Proposals, seconds: float) -> None:
        """Record what the step brought."""
        self._proposals, self.seconds, self.done = proposals, seconds, True


class TargetDrafts:
    """Collects the proposals in verdicts. It is a `DraftSource`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._vocabulary_size = 0
        self._proposals: Proposals = {}
        self._probe: TargetDraftCalls | None = None
        self._probed: set[SequenceId] = set()
        """Sequences of the probe that have not ended."""

    @property
    def is_idle(self) -> bool:
        """Whether no probe waits for its step."""
        return self._probe is None

    def start(self, vocabulary_size: int) -> None:
        """See `DraftSource`. A new target has no drafts yet."""
        self._vocabulary_size = vocabulary_size
        self._proposals.clear()
        self._end_probe({}, 0.0)

    def next_budgets(self, wanted: Mapping[SequenceId, DraftBudget]) -> Mapping[SequenceId, DraftBudget]:
        """See `DraftSource`. Sequences of a probe have its budget."""
        if self._probe is None:
            return wanted
        return {**{name: request.budget for name, request in self._probe.requests.items()}, **wanted}

    def propose(self, requests: Mapping[SequenceId, DraftRequest]) -> TargetDraftCalls:
        """Return the drafts that the last step brought, as far as they fit the requests."""
        found: Proposals = {}
        for sequence_id, request in requests.items():
            proposal = self._proposals.pop(sequence_id, None)
            if proposal is None:
                continue
            if proposal.base_len == len(request.sequence):
                found[sequence_id] = checked(proposal, request.budget, self._vocabulary_size)
            else:
                self._metrics.stale_proposal()
        return TargetDraftCalls(requests, found, done=True)

    def probe(self, requests: Mapping[SequenceId, DraftRequest]) -> TargetDraftCalls:
        """Ask for drafts with the next step."""
        self._probe = TargetDraftCalls(requests, {}, done=False)
        self._probed = set(requests)
        return self._probe

    def receive(self, rows: Iterable[VerifyRow], step: StepResult) -> None:
        """See `DraftSource`."""
        budgets = {row.sequence_id: row.next_budget for row in rows if row.next_budget.max_nodes}
        if not budgets:
            return
        arrived: dict[SequenceId, Proposal] = {
            verdict.sequence_id: verdict.proposal
            for verdict in step.verdicts
            if verdict.proposal is not None and verdict.sequence_id in budgets
        }
        self._proposals.update(arrived)
        self._metrics.drafter_worked(step.draft_seconds)
        probe = self._probe
        if probe is not None and not budgets.keys().isdisjoint(probe.requests):
            self._end_probe(
                {
                    name: checked(proposal, budgets[name], self._vocabulary_size)
                    for name, proposal in arrived.items()
                    if name in probe.requests
                },
                step.draft_seconds,
            )

    def is_prefilled(self, sequence: Sequence) -> bool:  # noqa: ARG002 - part of the interface
        """Return true: the drafter on the target is brought up to date by every step."""
        return True

    def prefill(self, sequences: Iterable[Sequence]) -> TargetDraftCalls:  # noqa: ARG002 - part of the interface
        """Do nothing; see `is_prefilled`."""
        return TargetDraftCalls({}, {}, done=True)

    def prefill_seconds(self, sequence: Sequence) -> float:  # noqa: ARG002 - part of the interface
        """Return 0; see `is_prefilled`."""
        return 0.0

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Drop the drafts of sequences that have ended. The target releases its own state with their KV."""
        for sequence_id in sequence_ids:
            self._proposals.pop(sequence_id, None)
            self._probed.discard(sequence_id)
        if not self._probed:
            self._end_probe({}, 0.0)

    async def close(self, timeout_seconds: float) -> None:
        """Do nothing: no call is under way."""

    def _end_probe(self, proposals: Proposals, seconds: float) -> None:
        if self._probe is not None:
            self._probe.end(proposals, seconds)
            self._probe = None
