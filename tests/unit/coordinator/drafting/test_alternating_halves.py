"""Alternating halves: one half is drafted for while the other is verified."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.verification import StepBatch, StepResult
from tests.support.fakes.fake_cluster import requests, until, value_of
from tests.support.fakes.fake_drafters import FailingDrafter, RandomDrafter
from tests.support.fakes.fake_target import FakeTarget
from tests.support.fakes.simulated_time import (
    DrafterModel,
    SimulatedCluster,
    TimedDrafter,
    TimedTarget,
    equal_requests,
    gpu_step,
    simulate,
)


@pytest.mark.parametrize("controller", ["auto", "off"])
def test_with_alternating_halves_the_target_does_not_wait_for_drafts(controller: str) -> None:
    async def scenario(alternate: str) -> float:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.8, call_seconds=0.009, has_probabilities=True))
        cluster = SimulatedCluster([drafter], target, draft__controller=controller, draft__alternate=alternate)
        async with cluster.coordinator:
            await cluster.serve(equal_requests(8, 120))
        assert target.accepted > 0
        return value_of(cluster.metrics, "pilotfish:propose_latency_seconds_sum") / len(target.batches)

    assert simulate(scenario("on")) < 0.2 * simulate(scenario("off"))


class CountingDrafter(TimedDrafter):
    """A drafter that counts its calls when they begin."""

    begun = 0

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        self.begun += 1
        return await super().propose(rows, timeout_seconds)


class SharedTarget(TimedTarget):
    """A target on the device of a drafter: steps beside which it drafts take more than twice as long."""

    drafter: CountingDrafter

    async def step(self, batch: StepBatch) -> StepResult:
        before = self.drafter.begun
        result = await super().step(batch)
        if self.drafter.begun > before:
            await asyncio.sleep(1.3 * gpu_step(len(batch.rows), sum(row.width for row in batch.rows)))
        return result


def test_alternating_halves_that_are_slower_than_all_rows_without_drafts_are_given_up() -> None:
    async def seconds(alternate: str, method: str) -> float:
        target = SharedTarget(gpu_step)
        target.drafter = CountingDrafter(target, DrafterModel(0.8, call_seconds=0.009, has_probabilities=True))
        settings = {"draft__alternate": alternate, "draft__method": method}
        cluster = SimulatedCluster([target.drafter], target, **settings)
        async with cluster.coordinator:
            taken = await cluster.serve(equal_requests(8, 400))
        if method != "none":
            assert target.accepted > 0
            halves = sum(len(batch.rows) == 4 for batch in target.batches)
            assert 2 < halves < 60  # they were tried
        return taken

    assert simulate(seconds("on", "ngram")) < 1.2 * simulate(seconds("off", "none"))


@pytest.mark.parametrize("controller", ["auto", "off"])
def test_without_a_drafter_all_sequences_are_in_each_step(controller: str) -> None:
    """Halves without drafts would take twice as many steps."""

    async def steps(alternate: str, *, is_down: bool) -> int:
        target = TimedTarget(gpu_step)
        drafters = [FailingDrafter(target)] if is_down else []
        cluster = SimulatedCluster(drafters, target, draft__controller=controller, draft__alternate=alternate)
        async with cluster.coordinator:
            await cluster.serve(equal_requests(8, 200))
        assert not target.accepted
        return len(target.batches)

    for is_down in (True, False):
        assert simulate(steps("on", is_down=is_down)) < 1.1 * simulate(steps("off", is_down=is_down))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_with_alternating_halves_the_tokens_are_the_same(count: int) -> None:
    async def scenario() -> None:
        target = FakeTarget(blocks=60, step_delay=0.001)
        cluster = SimulatedCluster([RandomDrafter(target)], target, draft__controller="off", draft__alternate="on")
        async with cluster.coordinator:
            await cluster.serve(requests(count, max_tokens=50))
            await until(lambda: target.blocks_free == target.blocks)
        if count > 1:
            assert any(len(batch.rows) < count for batch in target.batches[10:20])
        assert target.accepted > 0

    simulate(scenario())
