"""Requests that are refused, and the bound that the refusal names."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.core.errors import InvalidRequest, Overloaded
from cluster.core.ids import RequestId
from cluster.core.verification import TargetInfo
from tests.support.fakes.fake_cluster import all_tokens, read, request, serving, tokens_of, until
from tests.support.fakes.fake_drafters import WrongDrafter
from tests.support.fakes.fake_target import FakeTarget


async def test_a_full_queue_refuses_with_the_time_to_retry() -> None:
    target = FakeTarget(step_delay=0.001)
    limits = {"scheduler__max_sequences": 1, "scheduler__max_waiting": 2}
    async with serving(target, WrongDrafter(target), **limits) as coordinator:
        running = asyncio.create_task(read(coordinator, request("runs", max_tokens=400)))
        await until(lambda: len(target.batches) > 0)
        waiting = [asyncio.create_task(tokens_of(coordinator, request(f"waits{n}"))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refusal:
            await read(coordinator, request("too many"))
        assert refusal.value.retry_after_seconds >= 1.0
        coordinator.abort(RequestId("runs"))
        await running
        assert await asyncio.gather(*waiting) == [target.answer(request())] * 2


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "field", "words"),
    [
        (0, 5, "prompt", "at least one"),
        (5, 0, "max_tokens", "at least 1"),
        (64, 1, "prompt", "maximum context length is 64"),
        (60, 5, "max_tokens", "at most 4"),
        (30, 11, "max_tokens", "KV pool holds 40"),
    ],
)
async def test_a_request_that_can_never_fit_is_refused_with_the_bound(
    prompt_len: int, max_tokens: int, field: str, words: str
) -> None:
    target = FakeTarget(blocks=10 if "pool" in words else 100, max_context_len=64)
    async with serving(target, WrongDrafter(target)) as coordinator:
        with pytest.raises(InvalidRequest) as refusal:
            await read(coordinator, request(prompt=[1] * prompt_len, max_tokens=max_tokens))
    assert refusal.value.field == field
    assert words in str(refusal.value)
    assert target.batches == []


@pytest.mark.parametrize(("blocks", "longest"), [(100, 64), (10, 40)])
async def test_the_longest_sequence_is_what_context_and_pool_hold(blocks: int, longest: int) -> None:
    target = FakeTarget(blocks=blocks, max_context_len=64)
    async with serving(target, WrongDrafter(target)) as coordinator:
        assert coordinator.longest_sequence(source_len=0) == longest
        answer = await read(coordinator, request(prompt=[1] * 20, max_tokens=longest - 20))
        assert answer


async def test_two_live_requests_cannot_have_the_same_id() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        async with aclosing(coordinator.generate(request("same", max_tokens=100))) as commits:
            await anext(commits)
            with pytest.raises(InvalidRequest, match="request_id"):
                await read(coordinator, request("same"))
        assert await tokens_of(coordinator, request("same")) == target.answer(request())


class FakeTranslator(FakeTarget):
    """A fake encoder-decoder target."""

    async def info(self) -> TargetInfo:
        return replace(await super().info(), decoder_start=(0,), max_source_len=64)


async def test_the_sources_that_are_read_in_one_step_are_bounded() -> None:
    target = FakeTranslator()
    wanted = [replace(request(f"r{number}", (0,)), source=(1,) * 10) for number in range(12)]
    limits = {"scheduler__max_step_tokens": 32, "scheduler__max_prompt_tokens": 20}
    async with serving(target, WrongDrafter(target), **limits) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    read_in_step = [sum(len(row.start.source) for row in batch.rows if row.start) for batch in target.batches]
    assert sum(read_in_step) == 120
    assert max(read_in_step) == 30


async def test_a_source_is_refused_by_a_model_without_an_encoder() -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target)) as coordinator:
        with pytest.raises(InvalidRequest) as refusal:
            await read(coordinator, replace(request(), source=(1, 2)))
    assert (refusal.value.field, refusal.value.value) == ("source", "2 tokens")
