"""The ports of the workers: to the coordinator, and from target or drafter to a drafting method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo


class Drafter(Protocol):
    """Proposes drafts. A late, wrong or dead drafter affects only the speed."""

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """Return one proposal per row, in order. Raises `DrafterUnavailable`."""
        ...

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Release the sequences; unknown ones are not an error. Raises `DrafterUnavailable`."""
        ...


class Target(Protocol):
    """Verifies drafts and decides tokens. Only its verdicts commit a token."""

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences with as much of their KV as is stored already. The call may be repeated.

        Raises `TargetUnavailable`.
        """
        ...

    async def step(self, batch: StepBatch) -> StepResult:
        """Compute the rows in one forward pass. A repeated row returns the same verdict.

        Raises `TargetUnavailable`.
        """
        ...

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free the sequences' blocks; unknown sequences are not an error. Raises `TargetUnavailable`."""
        ...

    async def release_all(self) -> None:
        """Free all sequences. A coordinator that starts calls this before anything else.

        Raises `TargetUnavailable`.
        """
        ...

    async def info(self) -> TargetInfo:
        """Return the description of this target. Raises `TargetUnavailable`."""
        ...


class DraftMethod(Protocol):
    """Proposes drafts, on the target's rank 0 or in a process of its own. Synchronous, used by one thread."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Commit each row's new tokens and draft a tree after them. Returns one proposal per row, in order.

        The rows are of distinct sequences. A row that cannot be served gets a fault and does not affect the others.
        Repeating a row repeats its proposal.
        """
        ...

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free everything that is stored for the sequences. Unknown sequences are no error."""
        ...
