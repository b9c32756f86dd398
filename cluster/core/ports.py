"""The ports from the coordinator to the workers. The gRPC clients and the fakes of the tests implement them."""

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
