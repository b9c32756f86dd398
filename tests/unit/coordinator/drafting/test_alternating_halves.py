"""Alternating halves: one half is drafted for while the other is verified."""

from __future__ import annotations

import pytest

from tests.support.fakes.fake_cluster import requests, until, value_of
from tests.support.fakes.fake_drafters import RandomDrafter
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
