"""The port to drafters: where the drafts of rounds come from. Drafters elsewhere and the target implement it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.coordinator.clients.drafter import Proposals
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core import sequence as core
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow, WantedDrafts
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepResult, VerifyRow
from cluster.speculation.observation import DraftSample, DraftTime, Probe, RoundDrafts


@dataclass(frozen=True, slots=True)
class Proposed:
    """The drafts that were asked for before a step, and those that arrived."""

    requests: Mapping[SequenceId, DraftRequest] = field(default_factory=dict)
    proposals: Proposals = field(default_factory=dict)
    """The proposals that start at the present length of their sequences, by sequence."""
    waited: float = 0.0
    """How long the round waited, in seconds. For drafts on the target, the expected time."""
    sample: DraftSample | None = None
    """The wait, if it shows how long proposals take."""


class DraftSource(Protocol):
    """Where drafts come from. No method raises."""

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way and no probe waits for its step."""

    @property
    def wants_following(self) -> bool:
        """Whether verdicts are to say what grammars allow next; a drafter on the target knows without them."""

    def start(self, vocabulary_size: int) -> None:
        """Draft for a target that was reached for the first time or again; all tokens are within its vocabulary."""

    def plan_with(self, wanted: WantedDrafts) -> WantedDrafts:
        """The trees of the round that is planned next, when the controller wants `wanted` for the next drafts."""

    def split(self, plan: Plan) -> tuple[Plan, Plan]:
        """Split the rows into those of this round and those that are drafted for meanwhile; often there are none."""

    async def propose(self, rows: Iterable[PlannedRow], patience: Callable[[int, int], float]) -> Proposed:
        """Get drafts for the rows that want any. `patience` bounds the wait, from the number of rows and the depth."""

    def next_budgets(self, plan: Plan, probed: Collection[SequenceId]) -> Mapping[SequenceId, DraftBudget]:
        """The budgets to send to the target with the rows of a step; empty if drafts come from elsewhere.

        The next probe takes the sequences `probed`.
        """

    def work_during_step(self, later: Plan, unprefilled: Iterable[core.Sequence]) -> None:
        """Draft for the rows of `later`, and let drafters prefill sequences, while the target computes."""

    def receive(self, rows: Sequence[VerifyRow], step: StepResult, drafts: RoundDrafts) -> DraftTime:
        """Take what a step brought: evidence for drafters, or the drafts of the target. Returns what drafting cost."""

    def probe(self, requests: Mapping[SequenceId, DraftRequest]) -> bool:
        """Draft in the background; nothing of it is verified. Returns whether a probe has begun."""

    def take_probe(self) -> Probe | None:
        """The probe, once after it has ended."""

    def prefill_seconds(self, sequence: core.Sequence) -> float:
        """Expected time to prefill the sequence, in seconds; 0 when it needs none or nothing was measured."""

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended."""

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""


def draft_requests(
    rows: Iterable[PlannedRow], running: Mapping[SequenceId, LiveSequence]
) -> dict[SequenceId, DraftRequest]:
    """The requests of the planned rows that want a draft and whose sequences still run."""
    return {
        row.sequence_id: DraftRequest(live.sequence, row.draft)
        for row in rows
        if row.wants_draft and (live := running.get(row.sequence_id)) is not None
    }


def deepest(requests: Mapping[SequenceId, DraftRequest]) -> int:
    """Depth of the deepest requested tree, in tokens."""
    return max((request.budget.max_depth for request in requests.values()), default=0)


def within(budget: DraftBudget, largest: DraftBudget) -> DraftBudget:
    """The budget, no larger than another one."""
    return DraftBudget(min(budget.max_nodes, largest.max_nodes), min(budget.max_depth, largest.max_depth))
