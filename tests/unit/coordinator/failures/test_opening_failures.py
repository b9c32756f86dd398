"""Openings that fail, hang or are answered wrongly never change a token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.errors import InvalidRequest, NotReady, TargetUnavailable
from cluster.core.kv import KvOccupancy
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, Verdict
from deploy.simulation.block_memory import BlockMemory
from tests.support.fakes.fake_cluster import (
    all_tokens,
    configure,
    request,
    requests,
    serving,
    tokens_of,
    until,
    value_of,
)
from tests.support.fakes.fake_drafters import PerfectDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

LONG = tuple(range(1, 31))


async def test_an_opening_is_split_before_it_exceeds_the_size_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.clients.target.MAX_OPENED_TOKENS", 20)
    target = FakeTarget()
    calls: list[list[int]] = []
    plain = target.open

    async def measured(rows: Sequence[OpenRow]) -> OpenResult:
        calls.append([len(row.tokens) for row in rows])
        return await plain(rows)

    target.open = measured  # type: ignore[method-assign]
    wanted = [request(f"r{length}", range(length), max_tokens=2) for length in (8, 9, 10, 25, 4)]
    async with serving(target, WrongDrafter(target), scheduler__max_step_tokens=128) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert calls == [[8, 9], [10], [25], [4]]


async def test_a_sequence_that_the_target_lost_is_opened_again() -> None:
    target = FakeTarget(prefix_cache=True)
    plain, wrong_answers = target.step, iter(range(1))

    async def wrong(batch: StepBatch) -> StepResult:
        result = await plain(batch)
        if len(target.batches) > 3 and next(wrong_answers, None) is not None:
            return StepResult((Verdict(batch.rows[0].sequence_id, 1, tokens=(1,)),), result.kv)
        return result

    target.step = wrong  # type: ignore[method-assign]
    async with serving(target, WrongDrafter(target)) as coordinator:
        wanted = request(prompt=LONG)
        assert await tokens_of(coordinator, wanted) == target.answer(wanted)
    assert [found > 0 for _, found in target.openings] == [False, True]


async def test_an_opening_whose_answer_is_lost_is_repeated() -> None:
    target = FakeTarget(prefix_cache=True)
    metrics = Metrics()
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        target.fail_after_computing = 1
        assert await tokens_of(coordinator, request()) == target.answer(request())
        await until(lambda: target.is_empty)
    assert len(target.openings) == 2
    assert value_of(metrics, "pilotfish:target_replays_total") == 1


async def test_an_opening_that_hangs_counts_as_a_lost_target() -> None:
    target = FakeTarget()
    plain = target.open

    async def hang_once(rows: Sequence[OpenRow]) -> OpenResult:
        target.open = plain  # type: ignore[method-assign]
        await asyncio.Event().wait()
        return await plain(rows)

    target.open = hang_once  # type: ignore[method-assign]
    async with serving(target, WrongDrafter(target), target__step_timeout_seconds=0.02) as coordinator:
        assert await tokens_of(coordinator, request()) == target.answer(request())


async def test_a_row_that_cannot_be_opened_is_sent_from_its_start() -> None:
    target = FakeTarget(prefix_cache=True)
    plain = target.open

    async def strict(rows: Sequence[OpenRow]) -> OpenResult:
        if any(13 in row.tokens for row in rows):
            raise InvalidRequest("rows", 13, "another number")
        return await plain(rows)

    target.open = strict  # type: ignore[method-assign]
    wanted = [request(f"r{index}", (*LONG[:8], index + 10), seed=index) for index in range(6)]
    async with serving(target, WrongDrafter(target)) as coordinator:
        await tokens_of(coordinator, request("before", LONG[:9]))
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert [found for _, found in target.openings[1:]] == [8] * 5


async def test_a_wrong_answer_to_an_opening_costs_time_and_nothing_else() -> None:
    target = FakeTarget()
    wrong_answers = iter([(99,), (), (5,), (0, 0)])

    async def wrong(rows: Sequence[OpenRow]) -> OpenResult:
        return OpenResult(next(wrong_answers), KvOccupancy(target.blocks, target.blocks_free))

    target.open = wrong  # type: ignore[method-assign]
    async with serving(target, WrongDrafter(target)) as coordinator:
        for name in "abcd":
            assert await tokens_of(coordinator, request(name)) == target.answer(request())


async def test_a_request_whose_opening_crashes_the_target_is_served_without_opening() -> None:
    target = FakeTarget(prefix_cache=True)
    poison = request("poison", (9, 9, 9), max_tokens=4)
    plain = target.open

    async def fragile(rows: Sequence[OpenRow]) -> OpenResult:
        if any(row.tokens[:3] == poison.prompt for row in rows):
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        return await plain(rows)

    target.open = fragile  # type: ignore[method-assign]
    wanted = [*requests(3, max_tokens=6), poison]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert target.accepted > 0


async def test_a_request_that_no_longer_fits_a_smaller_target_fails_and_blocks_no_other() -> None:
    target = FakeTarget(blocks=20, step_delay=0.001)
    large, small = request("large", max_tokens=60), request("small", max_tokens=20)
    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = [asyncio.create_task(tokens_of(coordinator, one)) for one in (large, small)]
        await until(lambda: len(target.batches) > 3)
        target.crash()
        target.new_memory = partial(BlockMemory, 10, 4)
        target.revive()
        with pytest.raises(NotReady, match="KV pool holds 40 tokens"):
            await reading[0]
        assert await reading[1] == target.answer(small)
        await until(lambda: target.is_empty)
