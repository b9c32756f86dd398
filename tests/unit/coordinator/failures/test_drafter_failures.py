"""When a drafter fails, streams slow down and nothing else happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Many

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.errors import (
    DrafterUnavailable,
)
from cluster.core.ids import SequenceId
from tests.support.fakes.fake_cluster import all_tokens, configure, read, request, serving, tokens_of, until, value_of
from tests.support.fakes.fake_drafters import FailingDrafter, ForgetfulDrafter, PerfectDrafter, SlowDrafter
from tests.support.fakes.fake_target import FakeTarget


class UnreleasableDrafter(PerfectDrafter):
    """Fails the first releases."""

    refusals = 3

    async def release(self, sequence_ids: Many[SequenceId]) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise DrafterUnavailable("connection refused")
        await super().release(sequence_ids)


class RefusingDrafter(PerfectDrafter):
    """Cannot serve prompts that begin with 13."""

    def answer(self, row: DraftRow) -> Proposal:
        if row.new_tokens[:1] == (13,):
            return Proposal(row.sequence_id, row.base_len, fault=RowFault(RowFaultCode.INVALID, "too long for me"))
        return super().answer(row)


async def test_a_late_drafter_is_waited_for_once_not_in_every_round() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = SlowDrafter(target, delay=5.0)
    metrics = Metrics()
    async with Coordinator(target, [drafter], configure(draft__timeout_seconds=0.01), metrics) as coordinator:
        assert await tokens_of(coordinator, request(max_tokens=40)) == target.answer(request(max_tokens=40))
    assert len(drafter.calls) == 1
    assert value_of(metrics, "pilotfish:drafter_fallback_total", reason="late") == 1
    assert value_of(metrics, "pilotfish:drafter_fallback_total", reason="busy") > 30


async def test_a_drafter_that_comes_back_is_used_again() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = FailingDrafter(target)
    wanted = request(max_tokens=400)
    async with serving(target, drafter) as coordinator:
        reading = asyncio.create_task(read(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        drafter.is_down = False
        commits = await reading
    assert [token for commit in commits for token in commit.tokens] == target.answer(wanted)
    assert sum(commit.accepted for commit in commits) > 0
    assert not drafter.known


async def test_a_drafter_that_lost_a_sequence_is_sent_all_of_it_again() -> None:
    target = FakeTarget()
    drafter = ForgetfulDrafter(target)
    async with serving(target, drafter) as coordinator:
        await tokens_of(coordinator, request(max_tokens=100))
    rows = [row for call in drafter.calls for row in call]
    assert any(row.start is None for row in rows)
    assert sum(row.start is not None for row in rows) > 1
    assert all((row.start is not None) == (row.known_len == 0) for row in rows)
    assert target.accepted > 0


async def test_releases_are_repeated_until_they_succeed() -> None:
    target = FakeTarget()
    drafter = UnreleasableDrafter(target)
    async with serving(target, drafter) as coordinator:
        await tokens_of(coordinator, request())
        await until(lambda: not drafter.known)
    assert drafter.refusals < 0


async def test_a_drafter_that_cannot_serve_a_sequence_is_asked_for_it_once() -> None:
    target = FakeTarget()
    drafter = RefusingDrafter(target)
    wanted = [request("hard", (13, 1, 2)), request("easy", (1, 2, 3), max_tokens=20)]
    async with serving(target, drafter) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
        again = request("again", (13, 4))
        assert await tokens_of(coordinator, again) == target.answer(again)
    refused = [row.sequence_id for call in drafter.calls for row in call if row.new_tokens[:1] == (13,)]
    assert len(refused) == len(set(refused)) == 2
    assert max(len(call) for call in drafter.calls[1:]) == 1
    assert target.accepted > 0
