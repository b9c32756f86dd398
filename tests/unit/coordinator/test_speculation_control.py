"""The speculation controller in the loop, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.core.drafting import DraftBudget
from cluster.core.verification import OpenResult, OpenRow
from tests.support.fakes.fake_cluster import read, request, requests, until, value_of
from tests.support.fakes.fake_drafters import (
    FailingDrafter,
    FakeDrafter,
    ForgetfulDrafter,
    PerfectDrafter,
    RandomDrafter,
)
from tests.support.fakes.fake_target import FakeTarget
from tests.support.fakes.simulated_time import (
    DrafterModel,
    SimulatedCluster,
    TimedDrafter,
    TimedTarget,
    cpu_step,
    equal_requests,
    gpu_step,
    now,
    simulate,
)

pytestmark = pytest.mark.slow


def test_speculation_follows_a_drafter_that_becomes_good_or_bad() -> None:
    async def scenario() -> tuple[float, float, float]:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.0))
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            bad = await cluster.serve(equal_requests(2, 250, "a"))
            drafter.model = DrafterModel(0.9)
            await cluster.serve(equal_requests(2, 250, "b"))
            good = await cluster.serve(equal_requests(2, 250, "c"))
            drafter.model = DrafterModel(0.0)
            await cluster.serve(equal_requests(2, 100, "d"))
            worse = await cluster.serve(equal_requests(2, 250, "e"))
        return bad, good, worse

    bad, good, worse = simulate(scenario())
    assert good < 0.5 * bad
    assert worse == pytest.approx(bad, rel=0.03)


def test_speculation_starts_again_within_one_answer() -> None:
    async def scenario() -> int:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.0))
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            reading = asyncio.create_task(read(cluster.coordinator, request(max_tokens=900)))
            await until(lambda: len(target.batches) > 200)
            drafter.model = DrafterModel(0.9)
            await reading
        return len(target.batches)

    assert simulate(scenario()) < 600


def test_the_tokens_are_the_same_with_a_controller_and_any_drafter() -> None:
    async def scenario(drafter_type: type[FakeDrafter]) -> None:
        target = FakeTarget(blocks=4000, step_delay=0.01)
        cluster = SimulatedCluster([drafter_type(target)], target)
        async with cluster.coordinator:
            await cluster.serve(requests(6, max_tokens=60))
            await until(lambda: target.blocks_free == target.blocks)
        assert target.accepted > 0

    for drafter_type in (PerfectDrafter, RandomDrafter, ForgetfulDrafter):
        simulate(scenario(drafter_type))


def test_a_request_may_turn_drafts_off_or_bound_them() -> None:
    async def scenario(controller: str) -> None:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.9))
        cluster = SimulatedCluster([drafter], target, draft__controller=controller)
        off = replace(request("off", max_tokens=60, seed=3), max_draft_tokens=0)
        two = replace(request("two", prompt=(9, 9), max_tokens=60, seed=4), max_draft_tokens=2)
        async with cluster.coordinator:
            await cluster.serve([off, two])
        trees = [row for batch in target.batches for row in batch.rows]
        assert {0, 2} <= {len(row.tree) for row in trees} <= {0, 1, 2}
        asked = {row.new_tokens[:2] for call in drafter.calls for row in call if row.start is not None}
        assert asked == {(9, 9)}
        assert all(row.budget.max_nodes <= 2 for call in drafter.calls for row in call)

    simulate(scenario("auto"))
    simulate(scenario("off"))


def test_sequences_without_drafts_are_probed_within_a_share_of_the_time() -> None:
    async def scenario() -> tuple[float, float]:
        target = TimedTarget(cpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.0))
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            seconds = await cluster.serve(equal_requests(8, 400))
        return seconds, value_of(cluster.metrics, "pilotfish:drafter_call_seconds_total")

    seconds, drafting = simulate(scenario())
    assert 0 < drafting < 0.02 * seconds


def test_a_drafter_that_comes_back_is_found_while_speculation_is_off() -> None:
    async def scenario() -> None:
        target = TimedTarget(gpu_step)
        drafter = FailingDrafter(target)
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            reading = asyncio.create_task(cluster.serve(equal_requests(8, 600)))
            await until(lambda: len(target.batches) > 100)
            assert not drafter.known
            drafter.is_down = False
            await until(lambda: bool(drafter.known))
            await reading
        assert any(len(row.tree) for batch in target.batches for row in batch.rows)

    simulate(scenario())


def test_a_single_sequence_whose_drafts_pay_asks_for_the_largest_trees() -> None:
    async def scenario() -> list[DraftBudget]:
        target = TimedTarget(cpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.8, depth_seconds=0.0012, has_probabilities=True))
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            await cluster.serve(equal_requests(1, 400))
        return [row.budget for call in drafter.calls for row in call if row.budget.max_nodes]

    asked = simulate(scenario())
    assert set(asked[40:80]) == {max(asked, key=lambda budget: budget.max_nodes)}


def test_a_proposal_that_is_much_later_than_usual_is_not_waited_for() -> None:
    async def scenario() -> float:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.9))
        cluster = SimulatedCluster([drafter], target, draft__timeout_seconds=10.0)
        async with cluster.coordinator:
            reading = asyncio.create_task(read(cluster.coordinator, request(max_tokens=600)))
            await until(lambda: len(target.batches) > 30)
            drafter.model = DrafterModel(0.9, call_seconds=2.0)
            begun, steps = now(), len(target.batches)
            await until(lambda: len(target.batches) > steps + 3)
            waited = now() - begun
            drafter.model = DrafterModel(0.9)
            await reading
        assert value_of(cluster.metrics, "pilotfish:drafter_fallback_total", reason="late") >= 1
        return waited

    assert simulate(scenario()) < 0.1


def test_a_sequence_that_arrives_while_others_are_opened_has_no_draft_in_that_round() -> None:
    async def scenario() -> None:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.9))
        open_at_once = target.open

        async def open_slowly(rows: Sequence[OpenRow]) -> OpenResult:
            await asyncio.sleep(0.01)
            return await open_at_once(rows)

        target.open = open_slowly  # type: ignore[method-assign]
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            reading = []
            for index in range(12):
                wanted = request(f"r{index}", prompt=range(10), max_tokens=30, seed=index)
                reading.append(asyncio.create_task(read(cluster.coordinator, wanted)))
                await asyncio.sleep(0.006)
            await asyncio.gather(*reading)
        drafted = [row.base_len for call in drafter.calls for row in call if row.budget.max_nodes]
        assert drafted
        assert min(drafted) > 10  # the controller sizes trees of sequences that decode

    simulate(scenario())
