"""A loop that hangs or has ended makes the coordinator unhealthy. A target that is away or hangs does not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from cluster.coordinator.coordinator import HANG_SLACK_SECONDS, Coordinator
from cluster.coordinator.emit import Emitter
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.plan import Planner
from cluster.coordinator.wakeup import LoopProgress
from cluster.core.config.sections import Configuration
from cluster.core.errors import NotReady
from tests.support.fakes.fake_cluster import configure, request, tokens_of, until
from tests.support.fakes.fake_drafters import FakeDrafter
from tests.support.fakes.fake_target import FakeTarget
from tests.support.fakes.simulated_time import SimulatedLoop, now

HOUR_SECONDS = 3600.0
CONFIGURATION: Configuration = configure(target__step_timeout_seconds=20.0)
LONGEST_WAIT_SECONDS = 20.0 + CONFIGURATION.draft.timeout_seconds + HANG_SLACK_SECONDS


def simulate_for_long(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run in simulated time, without its bound."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(coroutine)


def coordinator_of(target: FakeTarget) -> Coordinator:
    return Coordinator(target, [FakeDrafter(target)], CONFIGURATION, Metrics(), now)


def test_progress_is_lost_once_nothing_begins_for_longer_than_the_bound() -> None:
    seconds = 0.0
    progress = LoopProgress(lambda: seconds, bound_seconds=10.0)
    seconds = 10.0
    assert progress.hung_seconds == 0
    seconds = 10.5
    assert progress.hung_seconds == 10.5
    progress.mark()
    assert progress.hung_seconds == 0


def test_a_coordinator_is_healthy_while_it_is_idle_and_while_its_target_is_away_or_hangs() -> None:
    async def run() -> None:
        target = FakeTarget()
        async with coordinator_of(target) as coordinator:
            for change in (lambda: None, target.crash, target.revive, target.hang):
                change()
                end = now() + HOUR_SECONDS
                while now() < end:
                    await asyncio.sleep(7.0)
                    coordinator.check_health()
            target.unhang()
            await until(lambda: coordinator.ready)
            assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))

    simulate_for_long(run())


def test_a_loop_that_hangs_makes_the_coordinator_unhealthy_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        target = FakeTarget()
        async with coordinator_of(target) as coordinator:
            monkeypatch.setattr(Planner, "plan", never)
            reading = asyncio.create_task(tokens_of(coordinator, request("waiting")))
            await asyncio.sleep(LONGEST_WAIT_SECONDS - 10.0)
            coordinator.check_health()
            await asyncio.sleep(20.0)
            with pytest.raises(NotReady, match="longer than any wait may last"):
                coordinator.check_health()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    simulate_for_long(run())


async def test_a_loop_that_has_ended_makes_the_coordinator_unhealthy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    target = FakeTarget()
    coordinator = Coordinator(target, [FakeDrafter(target)], configure(), Metrics())
    await coordinator.start()
    coordinator.check_health()
    monkeypatch.setattr(Planner, "plan", broken)
    monkeypatch.setattr(Emitter, "fail_all", broken)
    reading = asyncio.create_task(tokens_of(coordinator, request("waiting")))
    await until(lambda: not coordinator.ready)
    with pytest.raises(NotReady, match="the loop has ended: ZeroDivisionError"):
        coordinator.check_health()
    assert "the loop has ended" in caplog.text
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    monkeypatch.undo()
    await coordinator.stop(0.0)
