"""Preemption: with too little memory everything finishes, and no token changes."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from tests.support.fakes.fake_cluster import all_tokens, configure, request, serving, tokens_of, until, value_of
from tests.support.fakes.fake_drafters import FakeDrafter, PerfectDrafter, RandomDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

LONG = tuple(range(1, 31))


async def test_when_blocks_run_out_the_latest_are_preempted_and_all_answers_are_right() -> None:
    target = FakeTarget(blocks=12)
    metrics = Metrics()
    wanted = [request(f"r{index}", max_tokens=36, seed=index) for index in range(8)]
    async with Coordinator(target, [RandomDrafter(target)], configure(), metrics) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
        await until(lambda: target.blocks_free == target.blocks)
    assert value_of(metrics, "vllm:num_preemptions_total") > 0
    assert not target.faults
    assert target.accepted > 0


async def test_blocks_that_disappear_between_steps_cost_time_and_nothing_else() -> None:
    target = FakeTarget(blocks=20, step_delay=0.001)
    wanted = [request(f"r{index}", max_tokens=40, seed=index) for index in range(4)]
    async with serving(target, RandomDrafter(target)) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        target.memory.occupied = target.blocks_free  # between the report and the next step
        await until(lambda: len(target.faults) > 0)
        target.memory.occupied = 0
        assert await reading == [target.answer(one) for one in wanted]
        await until(lambda: target.blocks_free == target.blocks)
    assert target.accepted > 0


async def test_a_request_waits_for_blocks_that_are_taken_from_the_outside() -> None:
    target = FakeTarget(blocks=12)
    target.memory.occupied = 12
    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, request()))
        await asyncio.sleep(0.02)
        assert not reading.done() and target.batches == []
        target.memory.occupied = 0
        assert await reading == target.answer(request())


@pytest.mark.parametrize("drafter", [WrongDrafter, PerfectDrafter, RandomDrafter])
async def test_with_too_little_memory_everything_finishes_and_every_answer_is_right(
    drafter: type[FakeDrafter],
) -> None:
    target = FakeTarget(blocks=14, prefix_cache=True)
    metrics = Metrics()
    shared = [request(f"s{index}", LONG[:13], max_tokens=40, seed=index) for index in range(10)]
    alone = [request(f"a{index}", range(index, index + 9), max_tokens=40, seed=index) for index in range(10)]
    wanted = [*shared, *alone]
    random.Random(1).shuffle(wanted)
    async with Coordinator(target, [drafter(target)], configure(), metrics) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
        await until(lambda: target.is_empty)
    assert value_of(metrics, "vllm:num_preemptions_total") > 0
    assert target.drafted > 0
    assert (target.accepted > 0) == (drafter is not WrongDrafter)


async def test_a_preempted_sequence_resumes_from_what_is_still_stored() -> None:
    target = FakeTarget(blocks=12, prefix_cache=True)
    metrics = Metrics()
    wanted = [request("old", LONG[:8], max_tokens=32), request("young", LONG[10:18], max_tokens=32)]
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert value_of(metrics, "vllm:num_preemptions_total") >= 1
    asked, found = (value_of(metrics, f"pilotfish:resume_{name}_total") for name in ("queries", "hits"))
    assert 0 < found < asked
    assert value_of(metrics, "vllm:prefix_cache_queries_total") == 16  # a resumption is no new query
