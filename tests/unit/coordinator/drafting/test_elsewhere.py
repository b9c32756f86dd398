"""Drafts of drafters in processes of their own, at the port that the coordinator uses."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cluster.coordinator.clients.drafter_pool import DrafterPool
from cluster.coordinator.drafting.elsewhere import DraftsElsewhere
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.requests.decoding_strategy import NewSequence
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow
from cluster.core.sequence import Sequence
from cluster.core.verification import Verdict
from tests.support.fakes.fake_cluster import request, value_of
from tests.support.fakes.fake_drafters import FakeDrafter, PerfectDrafter
from tests.support.fakes.fake_target import FakeTarget


class ForAnotherLength(FakeDrafter):
    """Answers for a shorter sequence than it was asked about."""

    def answer(self, row: DraftRow) -> Proposal:
        return replace(super().answer(row), base_len=row.base_len - 1)


@pytest.mark.parametrize(
    ("drafter", "grows", "stale"),
    [
        (PerfectDrafter, False, 0),
        (PerfectDrafter, True, 1),
        (FakeDrafter, True, 0),  # nothing was proposed, so nothing is dropped
        (ForAnotherLength, False, 1),
        (ForAnotherLength, True, 1),
    ],
)
async def test_a_proposal_for_another_length_is_dropped_and_counted_once(
    drafter: type[FakeDrafter], grows: bool, stale: int
) -> None:
    metrics = Metrics()
    metrics.begin("fake", True, float, float, float)
    target, wanted = FakeTarget(), request()
    sequence = Sequence(SequenceId("a"), wanted, 0)
    live = LiveSequence(sequence, wanted.request_id, NewSequence(0, wanted, 0))
    pool = DrafterPool([drafter(target)], DraftSection(), metrics, time.monotonic)
    drafts = DraftsElsewhere(pool, {live.id: live}, metrics, time.monotonic, alternates=True)
    drafts.start(target.vocabulary_size)
    row = PlannedRow(live.id, pending=1, decide=True, draft=DraftBudget(4, 2))

    drafts.work_during_step(Plan(rows=(row,)), ())
    if grows:
        sequence.commit(Verdict(live.id, len(sequence), (3,), 0))
    proposed = await drafts.propose([row], lambda *_: 1.0)

    trees = [proposal.tree for proposal in proposed.proposals.values() if proposal.tree]
    assert bool(trees) == (drafter is PerfectDrafter and not grows)
    assert value_of(metrics, "pilotfish:stale_proposals_total") == stale
    await drafts.close(1.0)
