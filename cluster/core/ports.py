"""What the coordinator asks of the data plane; gRPC and the tests' fakes implement it alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo


class Drafter(Protocol):
    """Guesses. Late, wrong or dead, it costs speed and nothing else."""

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """One proposal per row, in order. Raises `DrafterUnavailable`."""
        ...

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forget the sequences; unknown ones are no error. Raises `DrafterUnavailable`."""
        ...


class Target(Protocol):
    """Decides. Its verdict is the only thing that commits a token."""

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences with whatever of their KV is stored already. Repeating it does no harm.

        Raises `TargetUnavailable`.
        """
        ...

    async def step(self, batch: StepBatch) -> StepResult:
        """Compute the rows. Repeating a row's (sequence, base_len) repeats its verdict.

        Raises `TargetUnavailable`.
        """
        ...

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free the sequences' blocks; unknown ones are no error. Raises `TargetUnavailable`."""
        ...

    async def release_all(self) -> None:
        """Free whatever is held: asked by a coordinator that starts, before it sends anything.

        Raises `TargetUnavailable`.
        """
        ...

    async def info(self) -> TargetInfo:
        """What this target is. Raises `TargetUnavailable`."""
        ...
