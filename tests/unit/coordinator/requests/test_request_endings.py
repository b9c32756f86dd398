"""Requests that end early free everything that they hold."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.core.errors import DeadlineExceeded
from cluster.core.request import GenerationRequest
from tests.support.fakes.beam_requests import beam_request
from tests.support.fakes.fake_cluster import (
    all_tokens,
    first_commit_then_leave,
    read,
    request,
    requests,
    serving,
    tokens_of,
    until,
)
from tests.support.fakes.fake_drafters import PerfectDrafter, RandomDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

of_every_kind = pytest.mark.parametrize(
    "wanted",
    [request(max_tokens=400), request(max_tokens=400, n=4), beam_request(max_tokens=400, stop=frozenset())],
    ids=["one answer", "several answers", "beams"],
)


@of_every_kind
async def test_a_client_that_disconnects_frees_everything_within_one_step(wanted: GenerationRequest) -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = PerfectDrafter(target)
    async with serving(target, drafter) as coordinator:
        reading = asyncio.create_task(read(coordinator, wanted))
        await until(lambda: len(target.batches) > 4)
        reading.cancel()
        steps = len(target.batches)
        await until(lambda: target.is_empty and not drafter.known)
        assert len(target.batches) <= steps + 1
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))


async def test_other_requests_continue_when_one_client_disconnects() -> None:
    target = FakeTarget()
    wanted = requests(4)
    async with serving(target, RandomDrafter(target)) as coordinator:
        leaving = first_commit_then_leave(coordinator, request("leaver", max_tokens=100))
        answers, _ = await asyncio.gather(all_tokens(coordinator, wanted), leaving)
    assert answers == [target.answer(one) for one in wanted]
    assert target.accepted > 0


@of_every_kind
async def test_a_deadline_ends_the_stream_and_frees_everything(wanted: GenerationRequest) -> None:
    target = FakeTarget(step_delay=0.005)
    drafter = WrongDrafter(target)
    async with serving(target, drafter) as coordinator:
        with pytest.raises(DeadlineExceeded):
            await read(coordinator, replace(wanted, deadline=time.monotonic() + 0.03))
        await until(lambda: target.is_empty and not drafter.known)


async def test_a_deadline_passes_while_the_client_does_not_read() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        wanted = request(max_tokens=400, deadline=time.monotonic() + 0.03)
        async with aclosing(coordinator.generate(wanted)) as commits:
            await anext(commits)
            await until(lambda: target.blocks_free == target.blocks)
            with pytest.raises(DeadlineExceeded):
                async for _ in commits:
                    pass


async def test_a_deadline_that_has_passed_is_refused_at_once() -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target)) as coordinator:
        with pytest.raises(DeadlineExceeded):
            await read(coordinator, request(deadline=time.monotonic() - 1))
    assert target.batches == []
