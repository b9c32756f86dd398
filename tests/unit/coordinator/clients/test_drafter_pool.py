"""Several drafters: assignment, failure and release, in simulated time."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import pytest

from cluster.core.drafting import DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.ingress.endpoints.cluster_status import read_replicas
from tests.support.fakes.fake_cluster import first_commit_then_leave, request, tokens_of, until
from tests.support.fakes.fake_drafters import FailingDrafter, MortalDrafter, PerfectDrafter
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


def test_sequences_are_spread_over_drafters_and_stay_there() -> None:
    async def scenario() -> None:
        target = FakeTarget(blocks=4000, step_delay=0.005)
        drafters = [PerfectDrafter(target) for _ in range(3)]
        cluster = SimulatedCluster(drafters, target, draft__controller="off")
        async with cluster.coordinator:
            await cluster.serve(equal_requests(6, 40))
            await until(lambda: not any(drafter.known for drafter in drafters))
        served = [{row.sequence_id for call in drafter.calls for row in call} for drafter in drafters]
        assert [len(names) for names in served] == [2, 2, 2]
        assert len(set[SequenceId]().union(*served)) == 6
        assert target.accepted > 0

    simulate(scenario())


def test_the_sequences_of_a_dead_drafter_move_and_some_return_with_it() -> None:
    async def scenario() -> None:
        target = FakeTarget(blocks=4000, max_context_len=4096, step_delay=0.005)
        drafters = [FailingDrafter(target), FailingDrafter(target)]
        for drafter in drafters:
            drafter.is_down = False
        cluster = SimulatedCluster(drafters, target, draft__controller="off")
        first, second = drafters
        async with cluster.coordinator:
            reading = asyncio.create_task(cluster.serve(equal_requests(4, 1000)))
            await until(lambda: len(second.known) == 2)
            first.is_down = True
            await until(lambda: len(second.known) == 4)
            first.is_down = False
            calls = len(first.calls)
            await until(lambda: len(first.calls) > calls + 20)
            assert len({row.sequence_id for row in first.calls[-1]}) == 2
            await reading
            await until(lambda: not first.known and not second.known)
        assert target.accepted > 0

    simulate(scenario())


def test_a_drafter_that_joins_gets_its_share_and_one_that_leaves_loses_all() -> None:
    async def scenario() -> None:
        target = FakeTarget(blocks=4000, max_context_len=4096, step_delay=0.005)
        first, second = PerfectDrafter(target), PerfectDrafter(target)
        cluster = SimulatedCluster([], target, draft__controller="off")
        async with cluster.coordinator as coordinator:
            reading = asyncio.create_task(cluster.serve(equal_requests(4, 1000)))
            coordinator.add_drafter("first", first)
            await until(lambda: len(first.known) == 4)
            coordinator.add_drafter("second", second)
            await until(lambda: len(second.known) == 2)
            (status,) = read_replicas(cluster.metrics.exposition()[0].decode())
            drafting = {drafter["id"]: drafter for drafter in status["drafting"]}
            assert {name: drafter["sequences"] for name, drafter in drafting.items()} == {"first": 2, "second": 2}
            assert all(drafter["available"] for drafter in drafting.values())
            assert drafting["first"]["proposed_tokens_total"] > 0
            await coordinator.remove_drafter("first")
            (status,) = read_replicas(cluster.metrics.exposition()[0].decode())
            assert [drafter["id"] for drafter in status["drafting"]] == ["second"]
            assert not first.known
            calls = len(first.calls)
            await until(lambda: len(second.known) == 4)
            await coordinator.remove_drafter("second")
            await coordinator.remove_drafter("unknown")
            await reading
            assert len(first.calls) == calls
        assert target.accepted > 0

    simulate(scenario())


def test_a_sequence_that_one_drafter_cannot_serve_moves_to_another() -> None:
    class Refusing(PerfectDrafter):
        def answer(self, row: DraftRow) -> Proposal:
            return Proposal(row.sequence_id, row.base_len, fault=RowFault(RowFaultCode.INVALID, "it is broken"))

    async def scenario() -> None:
        target = FakeTarget(blocks=4000, step_delay=0.005)
        refusing, serving = Refusing(target), PerfectDrafter(target)
        cluster = SimulatedCluster([refusing, serving], target, draft__controller="off")
        async with cluster.coordinator:
            await cluster.serve(equal_requests(4, 60))
        asked = [row.sequence_id for call in refusing.calls for row in call]
        assert len(asked) == len(set(asked)) >= 2
        assert len({row.sequence_id for call in serving.calls for row in call}) == 4
        assert target.accepted > 100

    simulate(scenario())


@pytest.mark.parametrize("prompt", [8, 200])
@pytest.mark.parametrize("controller", ["auto", "off"])
@pytest.mark.parametrize("drafters", [1, 2])
def test_a_sequence_of_which_drafters_die_twice_has_no_more_drafts_and_the_others_keep_theirs(
    drafters: int, controller: str, prompt: int
) -> None:
    async def scenario() -> None:
        target = TimedTarget(gpu_step)
        pool = [MortalDrafter(target, fatal=2) for _ in range(drafters)]
        cluster = SimulatedCluster(pool, target, draft__controller=controller)
        wanted = [request(f"r{seed}", (5,) * prompt, 400, seed=seed) for seed in range(4)]
        async with cluster.coordinator:
            await cluster.serve(wanted)
            assert sum(drafter.deaths for drafter in pool) == 2
            drafted = [row for drafter in pool for call in drafter.calls[-20:] for row in call if row.budget.max_nodes]
            assert len({row.sequence_id for row in drafted}) == len(wanted) - 1
            await until(lambda: not any(drafter.known for drafter in pool))
        assert target.accepted > 200

    simulate(scenario())


def test_a_sequence_that_two_lost_drafters_had_keeps_its_drafts_if_it_was_answered_in_between() -> None:
    async def scenario() -> None:
        target = TimedTarget(gpu_step)
        drafter = MortalDrafter(target, fatal=None)
        cluster = SimulatedCluster([drafter], target, draft__controller="off")
        async with cluster.coordinator:
            reading = asyncio.create_task(cluster.serve(equal_requests(1, 1000)))
            for _ in range(4):
                calls = len(drafter.calls)
                await until(lambda: len(drafter.calls) > calls + 3)  # noqa: B023 - it is called at once
                deaths, drafter.fatal = drafter.deaths, 1
                await until(lambda: drafter.deaths > deaths)  # noqa: B023 - it is called at once
                drafter.fatal = None
            calls = len(drafter.calls)
            await reading
            assert len(drafter.calls) > calls + 20
        assert drafter.deaths == 4

    simulate(scenario())


def test_nothing_is_kept_of_a_drafter_that_left() -> None:
    async def scenario() -> None:
        target = FakeTarget(blocks=4000, step_delay=0.005)
        cluster = SimulatedCluster([], target, draft__controller="off")
        async with cluster.coordinator as coordinator:
            drafter = PerfectDrafter(target)
            left = weakref.ref(drafter)
            coordinator.add_drafter("leaving", drafter)
            await cluster.serve(equal_requests(2, 40))
            assert drafter.calls
            del drafter
            await coordinator.remove_drafter("leaving")
            await cluster.serve(equal_requests(2, 10, "next"))
            gc.collect()
            assert left() is None
        assert target.accepted > 0

    simulate(scenario())


def test_two_drafters_of_one_name_are_refused() -> None:
    async def scenario() -> None:
        target = FakeTarget()
        cluster = SimulatedCluster([], target)
        cluster.coordinator.add_drafter("one", PerfectDrafter(target))
        with pytest.raises(ValueError, match="there is a drafter one already"):
            cluster.coordinator.add_drafter("one", PerfectDrafter(target))

    simulate(scenario())


@pytest.mark.parametrize("controller", ["auto", "off"])
@pytest.mark.parametrize("alternate", ["on", "off"])
def test_the_tokens_are_the_same_while_drafters_die_and_come_back(alternate: str, controller: str) -> None:
    async def scenario() -> None:
        rng = random.Random(11)
        target = TimedTarget(gpu_step)
        drafters = [FailingDrafter(target) for _ in range(3)]
        cluster = SimulatedCluster(drafters, target, draft__controller=controller, draft__alternate=alternate)
        async with cluster.coordinator:
            reading = asyncio.create_task(cluster.serve(equal_requests(7, 300)))
            while not reading.done():
                drafter = rng.choice(drafters)
                drafter.is_down = not drafter.is_down
                await asyncio.sleep(rng.uniform(0, 0.2))
            await reading
            for drafter in drafters:
                drafter.is_down = False
            await until(lambda: not any(drafter.known for drafter in drafters))
        assert target.accepted > 0

    simulate(scenario())


def test_a_request_that_leaves_during_a_call_is_released_on_every_drafter() -> None:
    async def scenario() -> None:
        target = FakeTarget(blocks=4000, step_delay=0.005)
        drafters = [TimedDrafter(target, DrafterModel(0.9, call_seconds=0.05)) for _ in range(2)]
        cluster = SimulatedCluster(drafters, target)
        async with cluster.coordinator:
            for index in range(4):
                await first_commit_then_leave(cluster.coordinator, request(f"r{index}", max_tokens=200))
            await until(lambda: not any(drafter.known for drafter in drafters))
            assert await tokens_of(cluster.coordinator, request()) == target.answer(request())

    simulate(scenario())
