"""When the target fails, streams pause: no token changes, no block leaks, no stream ends silently."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    TargetUnavailable,
)
from cluster.core.verification import StepBatch, StepResult
from tests.support.fakes.fake_cluster import (
    all_tokens,
    configure,
    read,
    request,
    requests,
    serving,
    tokens_of,
    until,
    value_of,
)
from tests.support.fakes.fake_drafters import FailingDrafter, PerfectDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget


@pytest.mark.parametrize("seed", range(4))
async def test_streams_are_the_same_when_target_and_drafter_crash_at_random(seed: int) -> None:
    rng = random.Random(seed)
    target = FakeTarget(blocks=40, step_delay=0.0005)
    drafter = FailingDrafter(target)
    drafter.is_down = False
    wanted = requests(8, max_tokens=40)
    async with serving(target, drafter, draft__timeout_seconds=0.5) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, wanted))
        await until(lambda: target.accepted > 0)
        for _ in range(20):
            await asyncio.sleep(rng.uniform(0, 0.02))
            match rng.randrange(4):
                case 0:
                    target.crash()
                    await asyncio.sleep(rng.uniform(0, 0.005))
                    target.revive()
                case 1:
                    target.revive()  # restarted between two steps
                case 2:
                    target.fail_after_computing = 1
                    await asyncio.sleep(rng.uniform(0, 0.005))
                    target.fail_after_computing = 0
                case 3:
                    drafter.is_down = not drafter.is_down
        assert await reading == [target.answer(one) for one in wanted]
        await until(lambda: target.blocks_free == target.blocks)


async def test_streams_pause_while_the_target_is_lost_and_replays_are_counted() -> None:
    target = FakeTarget(step_delay=0.001)
    metrics = Metrics()
    wanted = request(max_tokens=30)
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        target.crash()
        await asyncio.sleep(0.02)
        assert not reading.done()
        assert coordinator.ready  # a short absence refuses no request
        target.revive()
        assert await reading == target.answer(wanted)
    assert value_of(metrics, "pilotfish:target_replays_total") == 1


async def test_a_target_that_stays_away_makes_the_coordinator_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.GRACE_SECONDS", 0.0)
    target = FakeTarget()
    async with serving(target, WrongDrafter(target)) as coordinator:
        target.crash()
        reading = asyncio.create_task(tokens_of(coordinator, request()))
        await until(lambda: not coordinator.ready)
        with pytest.raises(NotReady):
            await read(coordinator, request("another"))
        target.revive()
        assert await reading == target.answer(request())
        assert coordinator.ready


async def test_a_deadline_passes_while_the_target_hangs() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=400, deadline=time.monotonic() + 0.25)))
        await until(lambda: len(target.batches) > 2)
        target.hang()
        with pytest.raises(DeadlineExceeded):
            await reading
        target.unhang()
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))
        await until(lambda: target.blocks_free == target.blocks)


async def test_a_step_that_hangs_counts_as_a_lost_target() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = request(max_tokens=30)
    async with serving(target, WrongDrafter(target), target__step_timeout_seconds=0.03) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, wanted))
        await until(lambda: len(target.batches) > 2)
        plain, hung = target.step, asyncio.Event()

        async def hang_once(batch: StepBatch) -> StepResult:
            target.step = plain  # type: ignore[method-assign]
            hung.set()
            await asyncio.Event().wait()
            return await plain(batch)

        target.step = hang_once  # type: ignore[method-assign]
        assert await reading == target.answer(wanted)
        assert hung.is_set()


async def test_a_step_that_the_target_refuses_is_tried_again() -> None:
    target = FakeTarget()
    plain = target.step

    async def overloaded_once(batch: StepBatch) -> StepResult:
        target.step = plain  # type: ignore[method-assign]
        raise Overloaded("too many calls")

    async with serving(target, WrongDrafter(target)) as coordinator:
        target.step = overloaded_once  # type: ignore[method-assign]
        assert await tokens_of(coordinator, request()) == target.answer(request())


async def test_a_request_that_crashes_the_target_every_time_is_given_up() -> None:
    target = FakeTarget(blocks=40)
    poison = request("poison", (9, 9, 9), max_tokens=4)
    original = target.step

    async def step(batch: StepBatch) -> StepResult:
        if any(row.pending[: len(poison.prompt)] == poison.prompt for row in batch.rows):
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        harmless = requests(4, max_tokens=6)
        reading = asyncio.create_task(all_tokens(coordinator, harmless))
        with pytest.raises(TargetUnavailable, match="times in a row on this request"):
            await tokens_of(coordinator, poison)
        assert await reading == [target.answer(one) for one in harmless]
    assert target.accepted > 0


async def test_a_target_that_is_lost_while_no_request_runs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.GRACE_SECONDS", 0.05)
    target = FakeTarget()
    async with serving(target, PerfectDrafter(target)) as coordinator:
        assert coordinator.ready
        target.crash()
        await until(lambda: not coordinator.ready)
        target.revive()
        await until(lambda: coordinator.ready)


async def test_an_unexpected_error_of_the_target_counts_as_a_lost_target() -> None:
    target = FakeTarget()
    original, failures = target.step, [RuntimeError("unexpected")]

    async def step(batch: StepBatch) -> StepResult:
        if failures:
            raise failures.pop()
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        wanted = request("well", max_tokens=5)
        assert await tokens_of(coordinator, wanted) == target.answer(wanted)
    assert target.accepted > 0
