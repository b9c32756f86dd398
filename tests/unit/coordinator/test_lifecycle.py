"""The coordinator's start, drain, stop and idle state."""

from __future__ import annotations

import asyncio

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.errors import NotReady
from tests.support.fakes.fake_cluster import all_tokens, configure, read, request, requests, serving, tokens_of, until
from tests.support.fakes.fake_drafters import PerfectDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget


async def test_requests_are_refused_before_the_start_and_after_the_stop() -> None:
    target = FakeTarget()
    coordinator = Coordinator(target, [PerfectDrafter(target)], configure(), Metrics())
    seen_ready = [coordinator.ready]
    with pytest.raises(NotReady):
        await read(coordinator, request())
    await coordinator.start()
    seen_ready.append(coordinator.ready)
    assert coordinator.info.model == "fake"
    await coordinator.stop(0.0)
    seen_ready.append(coordinator.ready)
    assert seen_ready == [False, True, False]
    with pytest.raises(NotReady):
        await read(coordinator, request())


async def test_stopping_completes_accepted_answers_and_refuses_new_ones() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = requests(3)
    async with serving(target, WrongDrafter(target), scheduler__max_sequences=2) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, wanted))
        await until(lambda: len(target.batches) > 1)
        stopping = asyncio.create_task(coordinator.stop(30.0))
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            await read(coordinator, request("late"))
        assert await reading == [target.answer(one) for one in wanted]
        await stopping
    assert target.blocks_free == target.blocks


async def test_requests_that_outlast_the_drain_get_an_error_and_are_freed(caplog: pytest.LogCaptureFixture) -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = PerfectDrafter(target)
    async with serving(target, drafter) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=500)))
        await until(lambda: len(target.batches) > 1)
        await coordinator.stop(0.01)
        with pytest.raises(NotReady):
            await reading
    told = (
        "ended 1 request with an error, not complete after draining for 0.01 s; server.drain_timeout_seconds sets the"
    )
    assert told in caplog.text
    assert target.blocks_free == target.blocks
    assert not drafter.known


async def test_an_idle_coordinator_makes_no_calls() -> None:
    target = FakeTarget()
    calls = 0
    plain = target.info

    async def counted() -> object:
        nonlocal calls
        calls += 1
        return await plain()

    async with serving(target, PerfectDrafter(target)) as coordinator:
        await tokens_of(coordinator, request())
        await until(lambda: target.blocks_free == target.blocks)
        await asyncio.sleep(0.02)
        target.info = counted  # type: ignore[method-assign, assignment]
        steps = len(target.batches)
        await asyncio.sleep(0.05)
        assert (calls, len(target.batches)) == (0, steps)
        assert await tokens_of(coordinator, request("again")) == target.answer(request())
