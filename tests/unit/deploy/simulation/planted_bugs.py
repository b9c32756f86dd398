"""Bugs planted into the control plane, which the simulated fault schedules must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from cluster.coordinator.clients.drafter import DrafterClient
from cluster.coordinator.clients.release_queue import MAX_BATCH, ReleaseQueue
from cluster.coordinator.commit import CommitResult, Committer
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import WorkerUnavailable
from cluster.core.verification import StepResult, VerifyRow
from cluster.ingress.router.progress import StreamProgress
from pilotfish.v1 import generation_pb2


def plant_double_commit(patch: pytest.MonkeyPatch) -> None:
    """The verdict after a lost call is committed twice, as if the lost one had arrived too."""
    commit = Committer.commit

    def commit_twice(self: Committer, rows: tuple[VerifyRow, ...], step: StepResult) -> CommitResult:
        lost = [live for row in rows if (live := self._table.running.get(row.sequence_id)) is not None and live.losses]
        result = commit(self, rows, step)
        verdicts = {verdict.sequence_id: verdict for verdict in step.verdicts}
        for live in lost:
            live.sequence.commit(replace(verdicts[live.id], base_len=len(live.sequence)))
        return result

    patch.setattr(Committer, "commit", commit_twice)


def plant_lost_release(patch: pytest.MonkeyPatch) -> None:
    """A release that the worker did not answer is not repeated."""

    async def run_once(self: Any) -> None:
        while self._queued:
            batch = tuple(islice(self._queued, MAX_BATCH))
            for sequence_id in batch:
                del self._queued[sequence_id]
            try:
                await self._release(batch)
            except WorkerUnavailable:
                continue
            self._on_released()

    patch.setattr(ReleaseQueue, "_run", run_once)


def plant_accepted_stale_draft(patch: pytest.MonkeyPatch) -> None:
    """A proposal for another length counts as one for this length."""
    valid = DrafterClient._valid

    def accept(self: DrafterClient, row: DraftRow, proposal: Proposal | None, vocabulary_size: int) -> Proposal:
        if proposal is not None:
            proposal = replace(proposal, base_len=row.base_len)
        return valid(self, row, proposal, vocabulary_size)

    patch.setattr(DrafterClient, "_valid", accept)


def plant_lost_resume(patch: pytest.MonkeyPatch) -> None:
    """A request that is sent again does not say which tokens were received."""
    message = StreamProgress.message

    def from_the_start(self: StreamProgress) -> generation_pb2.GenerateRequest:
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(message(self))
        for answer in request.resume:
            answer.CopyFrom(generation_pb2.ResumedAnswer(index=answer.index))
        return request

    patch.setattr(StreamProgress, "message", from_the_start)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "double commit": (plant_double_commit, "differs|ended after"),
    "lost release": (plant_lost_release, "leak"),
    "accepted stale draft": (plant_accepted_stale_draft, "did not grow from"),
    "lost resume": (plant_lost_resume, "differs|ended after|grew after its end"),
}
"""How each bug is planted, and a pattern of the violations that reveal it."""
