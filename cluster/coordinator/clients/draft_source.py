"""The interface of the two sources of drafts: a pool of drafters, and the target itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from cluster.core.drafting import DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest, Sequence
from cluster.core.verification import StepResult, VerifyRow

Proposals = dict[SequenceId, Proposal]


class DraftCalls(Protocol):
    """Requests for drafts that are under way or answered. True if any request was sent."""

    def __bool__(self) -> bool: ...

    @property
    def requests(self) -> Mapping[SequenceId, DraftRequest]:
        """The requested drafts."""
        ...

    @property
    def depth(self) -> int:
        """Depth of the deepest requested tree, in tokens."""
        ...

    @property
    def done(self) -> bool:
        """Whether all calls have ended."""
        ...

    @property
    def seconds(self) -> float:
        """Time of the slowest call that has ended, in seconds."""
        ...

    async def wait(self, patience: float) -> None:
        """Return when all calls have ended, or after `patience` seconds."""
        ...

    def take(self) -> Proposals:
        """Return the proposals that have arrived."""
        ...


class DraftSource(Protocol):
    """Where drafts come from. No method raises."""

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        ...

    def start(self, vocabulary_size: int) -> None:
        """Set the size of the target's vocabulary, within which all drafted tokens must be."""
        ...

    def next_budgets(self, wanted: Mapping[SequenceId, DraftBudget]) -> Mapping[SequenceId, DraftBudget]:
        """The budgets to send to the target with the next step, out of those that the following round wants."""
        ...

    def propose(self, requests: Mapping[SequenceId, DraftRequest]) -> DraftCalls:
        """Request drafts for this round."""
        ...

    def probe(self, requests: Mapping[SequenceId, DraftRequest]) -> DraftCalls:
        """Request drafts in the background. They are not verified."""
        ...

    def receive(self, rows: Iterable[VerifyRow], step: StepResult) -> None:
        """Take what a step of the target brought: evidence for drafters, or the drafts of the target."""
        ...

    def is_prefilled(self, sequence: Sequence) -> bool:
        """Whether a draft for the sequence needs no long prefill first."""
        ...

    def prefill(self, sequences: Iterable[Sequence]) -> DraftCalls:
        """Let drafters prefill sequences in the background."""
        ...

    def prefill_seconds(self, sequence: Sequence) -> float:
        """Expected time to prefill the sequence, in seconds; 0 when it needs none or nothing was measured."""
        ...

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Release sequences that have ended."""
        ...

    async def close(self, timeout_seconds: float) -> None:
        """Cancel the calls under way and send the queued releases."""
        ...
