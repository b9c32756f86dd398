"""Bugs of the coordinator itself end requests with an error, and the server continues."""

from __future__ import annotations

import asyncio

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.draft_origin import DraftOrigin
from cluster.core.errors import NotReady, WorkerUnavailable
from cluster.core.request import Commit
from cluster.core.scheduling import scheduler
from cluster.core.sequence import Sequence
from cluster.core.verification import Verdict
from tests.support.fakes.fake_cluster import configure, read, request, requests, serving, tokens_of, until, value_of
from tests.support.fakes.fake_drafters import WrongDrafter
from tests.support.fakes.fake_target import FakeTarget


async def test_a_bug_in_the_loop_ends_all_streams_with_an_error_and_the_loop_restarts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.RESTART_SECONDS", 0.05)
    target = FakeTarget(step_delay=0.001)
    metrics = Metrics()
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=400)))
        await until(lambda: len(target.batches) > 2)

        plain = scheduler.plan

        def broken(state: scheduler.State) -> scheduler.Plan:
            monkeypatch.setattr(scheduler, "plan", plain)
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(scheduler, "plan", broken)
        with pytest.raises(NotReady):
            await reading
        seen_ready = coordinator.ready
        assert not seen_ready
        await until(lambda: coordinator.ready)
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))
        await until(lambda: target.blocks_free == target.blocks)
    assert value_of(metrics, "pilotfish:loop_restarts_total") == 1
    assert "the loop failed because of a bug" in caplog.text


async def test_a_bug_in_one_request_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    wanted = requests(3)
    plain = Sequence.commit

    def broken(self: Sequence, verdict: Verdict, origins: tuple[DraftOrigin, ...] = ()) -> Commit | None:
        if self.request.request_id == "failing" and len(self) > 10:
            raise ZeroDivisionError("a bug")
        return plain(self, verdict, origins)

    monkeypatch.setattr(Sequence, "commit", broken)
    async with serving(target, WrongDrafter(target)) as coordinator:
        failing = tokens_of(coordinator, request("failing", max_tokens=100))
        *answers, end = await asyncio.gather(
            *(tokens_of(coordinator, one) for one in wanted), failing, return_exceptions=True
        )
        assert answers == [target.answer(one) for one in wanted]
        assert isinstance(end, WorkerUnavailable)
        assert coordinator.ready
        await until(lambda: target.blocks_free == target.blocks)
