"""A target engine and a drafting method behind the coordinator's ports, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from workers.verify.engine import TargetEngine


class EngineTarget:
    """A target that loses all sequences in every step whose number is in `crashes`."""

    def __init__(self, engine: TargetEngine, crashes: Sequence[int] = ()) -> None:
        self.engine = engine
        self.steps = 0
        self.drafted = 0
        """Nodes of all trees that were verified."""
        self.fewest_free = engine.info().kv.blocks_free
        """Least number of free blocks after a step."""
        self._crashes = set(crashes)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is stored and no block is held."""
        kv = self.engine.info().kv
        return not self.engine._sequences and kv.blocks_free == kv.blocks_total

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        return self.engine.open(rows)

    async def step(self, batch: StepBatch) -> StepResult:
        await asyncio.sleep(0)
        self.steps += 1
        if self.steps in self._crashes:
            self.engine.release_all()
            self.engine._epoch += "+"
            raise TargetUnavailable("the target restarts")
        result = self.engine.step(batch)
        self.drafted += sum(len(row.tree) for row in batch.rows)
        self.fewest_free = min(self.fewest_free, result.kv.blocks_free)
        return result

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self.engine.release(sequence_ids)

    async def release_all(self) -> None:
        self.engine.release_all()

    async def info(self) -> TargetInfo:
        return self.engine.info()


class MethodDrafter:
    """A drafter that runs one method."""

    def __init__(self, method: DraftMethod) -> None:
        self._method = method

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        await asyncio.sleep(0)
        return self._method.propose(rows)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._method.release(sequence_ids)
