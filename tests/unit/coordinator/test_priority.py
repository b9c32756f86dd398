"""`scheduler.policy: priority`: requests with a lower priority start first, and a full queue gives up the highest."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.core.errors import InvalidRequest, Overloaded
from cluster.core.fair_queue import QueuedRequest, outranked
from cluster.core.ids import RequestId
from cluster.core.request import GenerationRequest
from tests.support.fakes.fake_cluster import read, request, serving, until
from tests.support.fakes.fake_drafters import WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

LIMITS = {"scheduler__max_sequences": 1, "scheduler__max_waiting": 4}


def ranked(name: str, priority: int, max_tokens: int = 5) -> GenerationRequest:
    return replace(request(name, max_tokens=max_tokens), priority=priority)


async def test_the_lowest_priority_starts_first_and_of_equal_ones_the_oldest() -> None:
    target, ended = FakeTarget(step_delay=0.001), list[str]()
    async with serving(target, WrongDrafter(target), **LIMITS, scheduler__policy="priority") as coordinator:

        async def answer(one: GenerationRequest) -> None:
            await read(coordinator, one)
            ended.append(one.request_id)

        running = asyncio.create_task(read(coordinator, ranked("running", 9, 400)))
        await until(lambda: len(target.batches) > 0)
        wanted = [ranked("late", 3), ranked("first", 0), ranked("second", 0), ranked("before", -1)]
        tasks = [asyncio.create_task(answer(one)) for one in wanted]
        await asyncio.sleep(0)
        coordinator.abort(RequestId("running"))
        await asyncio.gather(running, *tasks)
    assert ended == ["before", "first", "second", "late"]


async def test_a_full_queue_gives_up_the_waiting_request_with_the_highest_priority() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target), **LIMITS, scheduler__policy="priority") as coordinator:
        running = asyncio.create_task(read(coordinator, ranked("running", 9, 400)))
        await until(lambda: len(target.batches) > 0)
        waiting = [asyncio.create_task(read(coordinator, ranked(f"w{number}", number))) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            coordinator.check_room("", RequestId("x"), 1, 3)
        urgent = asyncio.create_task(read(coordinator, ranked("urgent", 1)))
        with pytest.raises(Overloaded):
            await waiting[3]
        coordinator.abort(RequestId("running"))
        await running
        assert all(commits[-1].finish is not None for commits in await asyncio.gather(urgent, *waiting[:3]))


async def test_a_priority_is_refused_where_clients_take_turns() -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target)) as coordinator:
        with pytest.raises(InvalidRequest, match=r"priority.*-2.*scheduler\.policy is fair"):
            await read(coordinator, ranked("urgent", -2))
        assert (await read(coordinator, ranked("plain", 0)))[-1].finish is not None


def test_only_waiting_requests_of_a_higher_priority_make_room() -> None:
    def queued(name: str, priority: int, slots: int = 1, *, has_begun: bool = False) -> QueuedRequest:
        return QueuedRequest(RequestId(name), name, slots, has_begun, priority)

    requests = [queued("a", 5, has_begun=True), queued("b", 2), queued("c", 3), queued("d", 3, 2), queued("e", 1)]
    assert outranked(requests, 1, 1) == ("d",)
    assert outranked(requests, 1, 3) == ("d", "c")
    assert outranked(requests, 1, 4) == ("d", "c", "b")
    assert outranked(requests, 1, 5) == ()
    assert outranked(requests, 3, 1) == ()
