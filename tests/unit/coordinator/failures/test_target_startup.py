"""The first connection to a target."""

from __future__ import annotations

import asyncio
from copy import deepcopy

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from tests.support.fakes.fake_cluster import configure, request, serving, tokens_of
from tests.support.fakes.fake_drafters import PerfectDrafter
from tests.support.fakes.fake_target import FakeTarget


async def test_the_start_waits_for_the_target() -> None:
    target = FakeTarget()
    target.crash()
    coordinator = Coordinator(target, [PerfectDrafter(target)], configure(), Metrics())
    starting = asyncio.create_task(coordinator.start())
    await asyncio.sleep(0.01)
    assert not starting.done() and not coordinator.ready
    target.revive()
    await starting
    assert await tokens_of(coordinator, request()) == target.answer(request())
    await coordinator.stop(0.0)
    assert target.accepted > 0


async def test_a_coordinator_first_frees_what_the_target_stores_for_it() -> None:
    target = FakeTarget(blocks=12)
    orphans = FakeTarget(blocks=12)
    coordinator = Coordinator(target, [PerfectDrafter(target)], configure(), Metrics())
    await coordinator.start()
    reading = coordinator.generate(request("orphan", max_tokens=30))
    await anext(reading)
    # As if left from an earlier connection: what the coordinator frees as it stops is not freed here.
    orphans.stored, orphans.memory = deepcopy((target.stored, target.memory))
    await coordinator.stop(0.0)
    assert orphans.stored and orphans.blocks_free < orphans.blocks
    async with serving(orphans, PerfectDrafter(orphans)) as successor:
        assert orphans.is_empty
        wanted = request("well", max_tokens=5)
        assert await tokens_of(successor, wanted) == orphans.answer(wanted)
    assert orphans.accepted > 0
