"""Several answers to one prompt: each equals that of a separate request, and the prompt is computed once."""

from __future__ import annotations

import asyncio

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.errors import InvalidRequest, Overloaded
from cluster.core.ids import RequestId
from cluster.core.request import FinishReason
from tests.support.fakes.fake_cluster import (
    all_tokens,
    answers_of,
    configure,
    first_commit_then_leave,
    read,
    request,
    serving,
    tokens_of,
    until,
    value_of,
)
from tests.support.fakes.fake_drafters import FakeDrafter, PerfectDrafter, RandomDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

PROMPT = tuple(range(1, 23))


def widths(target: FakeTarget) -> list[int]:
    """Tokens of each step."""
    return [sum(row.width for row in batch.rows) for batch in target.batches]


# --- the text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix_cache"])
@pytest.mark.parametrize("blocks", [256, 16], ids=["roomy", "tight"])
@pytest.mark.parametrize("drafter", [WrongDrafter, PerfectDrafter, RandomDrafter])
async def test_every_answer_equals_that_of_a_single_request_with_its_seed(
    drafter: type[FakeDrafter], blocks: int, prefix_cache: bool
) -> None:
    target = FakeTarget(blocks=blocks, prefix_cache=prefix_cache)
    wanted = [request(f"r{index}", PROMPT[: 10 + 3 * index], 25, seed=100 * index, n=5) for index in range(3)]
    fake_drafter = drafter(target)
    async with serving(target, fake_drafter) as coordinator:
        answers = await asyncio.gather(*(answers_of(coordinator, one) for one in wanted))
        await until(lambda: target.is_empty and not fake_drafter.known)
    assert answers == [target.answers(one) for one in wanted]
    assert target.drafted > 0
    assert (target.accepted > 0) == (drafter is not WrongDrafter)


async def test_seeds_wrap_around_at_two_to_the_64th() -> None:
    target = FakeTarget()
    wanted = request(seed=2**64 - 1, n=3)
    async with serving(target, WrongDrafter(target)) as coordinator:
        assert await answers_of(coordinator, wanted) == target.answers(wanted)
        assert (await answers_of(coordinator, wanted))[1] == target.answer(request(seed=0))


async def test_each_answer_ends_with_its_own_usage() -> None:
    target = FakeTarget()
    lone = target.answers(request(max_tokens=30, n=4))
    stop = frozenset({lone[2][4]})
    wanted = request(max_tokens=30, n=4, stop=stop)
    async with serving(target, RandomDrafter(target)) as coordinator:
        commits = await read(coordinator, wanted)
    ends = {commit.index: commit for commit in commits if commit.finish is not None}
    assert sum(commit.finish is not None for commit in commits) == len(ends) == 4
    for index, answer in enumerate(target.answers(wanted)):
        usage = ends[index].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(answer))
        assert ends[index].finish is (FinishReason.STOP if answer[-1] in stop else FinishReason.LENGTH)


# --- the prompt ---------------------------------------------------------------------------------


async def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    target = FakeTarget(step_delay=0.001)
    fewest = target.blocks
    async with serving(target, WrongDrafter(target), draft__method="none") as coordinator:
        reading = asyncio.create_task(answers_of(coordinator, request(prompt=PROMPT, max_tokens=3, n=8)))
        while not reading.done():
            fewest = min(fewest, target.blocks_free)
            await asyncio.sleep(0)
    assert [(row.parent is not None, found) for row, found in target.openings] == [(False, 0)] + [(True, 21)] * 7
    assert widths(target) == [22, 8, 8, 7]  # the prompt, then a token of each
    assert target.blocks - fewest == 5 + 8  # five full blocks for all, and a last one of each


@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_a_first_sequence_that_ends_with_its_first_token_still_shares_the_prompt(prefix_cache: bool) -> None:
    target = FakeTarget(prefix_cache=prefix_cache)
    wanted = request(prompt=PROMPT, max_tokens=1, n=4)
    async with serving(target, WrongDrafter(target)) as coordinator:
        assert await answers_of(coordinator, wanted) == target.answers(wanted)
        await until(lambda: target.is_empty)
    assert [found for _, found in target.openings] == [0, 21, 21, 21]


async def test_a_finished_parent_is_evicted_before_any_running_sequence() -> None:
    target = FakeTarget(blocks=12, step_delay=0.001)
    metrics = Metrics()
    wanted = request("samples", PROMPT, max_tokens=1, n=6)
    other = request("old", PROMPT[:4], max_tokens=30)
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        running = asyncio.create_task(tokens_of(coordinator, other))
        await until(lambda: len(target.batches) > 12)  # half of the pool is taken, and will be needed
        assert await answers_of(coordinator, wanted) == target.answers(wanted)
        assert await running == target.answer(other)
        await until(lambda: target.is_empty)


async def test_forks_of_a_lost_parent_are_opened_without_it() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = request(prompt=PROMPT, max_tokens=20, n=4)
    plain = target.open

    async def crash_then_open(rows: object) -> object:
        target.open = plain  # type: ignore[method-assign]
        target.revive()  # a new epoch: the blocks of the parent are gone
        return await plain(rows)  # type: ignore[arg-type]

    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = asyncio.create_task(answers_of(coordinator, wanted))
        await until(lambda: len(target.openings) == 1)
        target.open = crash_then_open  # type: ignore[method-assign, assignment]
        assert await reading == target.answers(wanted)
        await until(lambda: target.is_empty)
    assert sum(found > 0 for _, found in target.openings) == 0


# --- early ends ---------------------------------------------------------------------------------


async def test_a_client_that_disconnects_before_the_forks_run_frees_everything() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        await first_commit_then_leave(coordinator, request(prompt=PROMPT, max_tokens=400, n=8))
        await until(lambda: target.is_empty)
        reading = asyncio.create_task(read(coordinator, request(prompt=range(1, 60), max_tokens=400, n=8)))
        await until(lambda: bool(target.stored))  # the prompt is not even computed
        reading.cancel()
        await until(lambda: target.is_empty)
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))


async def test_abort_ends_every_answer_that_is_unfinished() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, request("r", max_tokens=400, n=3)))
        await until(lambda: len(target.batches) > 5)
        assert coordinator.abort(RequestId("r"))
        commits = await reading
        ends = [commit for commit in commits if commit.finish is not None]
        assert [(commit.index, commit.finish) for commit in ends] == [(n, FinishReason.ABORT) for n in range(3)]
        for end in ends:
            assert end.usage is not None
            written = sum(len(commit.tokens) for commit in commits if commit.index == end.index)
            assert end.usage.completion_tokens == written > 0
        await until(lambda: target.is_empty)
        assert not coordinator.abort(RequestId("r"))


async def test_abort_before_the_prompt_is_computed_ends_all_answers() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target), scheduler__max_sequences=3) as coordinator:
        busy = asyncio.create_task(read(coordinator, request("busy", max_tokens=100, n=3)))
        await until(lambda: len(target.batches) > 5)
        reading = asyncio.create_task(read(coordinator, request("r", n=2)))
        await asyncio.sleep(0.005)
        assert coordinator.abort(RequestId("r"))
        ends = [(commit.index, commit.tokens, commit.finish) for commit in await reading]
        assert ends == [(0, (), FinishReason.ABORT), (1, (), FinishReason.ABORT)]
        coordinator.abort(RequestId("busy"))
        await busy


async def test_a_concluded_answer_is_computed_no_further_and_the_others_continue() -> None:
    target = FakeTarget(step_delay=0.0005)
    metrics = Metrics()
    wanted = request("r", max_tokens=40, n=3)
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        answers: list[list[int]] = [[] for _ in range(3)]
        finishes: list[tuple[int, FinishReason]] = []
        async for commit in coordinator.generate(wanted):
            answers[commit.index] += commit.tokens
            if commit.finish is not None:
                finishes.append((commit.index, commit.finish))
            if len(answers[1]) == 7 and commit.index == 1 and commit.tokens:
                assert coordinator.conclude(RequestId("r"), 1)
                assert not coordinator.conclude(RequestId("r"), 1)
        assert not coordinator.conclude(RequestId("r"), 0)
        await until(lambda: target.is_empty)
    whole = target.answers(wanted)
    assert answers == [whole[0], whole[1][:7], whole[2]]
    assert finishes == [(1, FinishReason.STOP), (0, FinishReason.LENGTH), (2, FinishReason.LENGTH)]
    assert value_of(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value_of(metrics, "vllm:request_success_total", finished_reason="abort") == 0


async def test_an_answer_without_tokens_cannot_be_concluded() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = request("r", max_tokens=5, n=2)
    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = asyncio.create_task(answers_of(coordinator, wanted))
        await asyncio.sleep(0)
        assert not any(coordinator.conclude(RequestId("r"), index) for index in (0, 1, 2))
        assert not coordinator.conclude(RequestId("unknown"))
        assert await reading == target.answers(wanted)


async def test_concluding_the_last_answer_ends_the_stream() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        commits = []
        async for commit in coordinator.generate(request("r", max_tokens=400)):
            commits.append(commit)
            coordinator.conclude(RequestId("r"))
        assert commits[-1].finish is FinishReason.STOP
        await until(lambda: target.is_empty)


# --- bounds and metrics -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 5])
async def test_more_answers_than_sequences_are_refused_with_the_bound(n: int) -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target), scheduler__max_sequences=4) as coordinator:
        with pytest.raises(InvalidRequest, match="4 sequences at a time") as refusal:
            await read(coordinator, request(n=n))
        assert refusal.value.field == "n"
        assert await answers_of(coordinator, request(n=4)) == target.answers(request(n=4))


async def test_the_queue_counts_answers_instead_of_requests() -> None:
    target = FakeTarget(step_delay=0.001)
    limits = {"scheduler__max_sequences": 4, "scheduler__max_waiting": 4}
    async with serving(target, WrongDrafter(target), **limits) as coordinator:
        first = asyncio.create_task(answers_of(coordinator, request("first", max_tokens=30, n=4)))
        second = asyncio.create_task(answers_of(coordinator, request("second", n=3)))
        await until(lambda: len(target.batches) > 3)
        with pytest.raises(Overloaded):
            await read(coordinator, request("third", n=2))
        assert await tokens_of(coordinator, request("third")) == target.answer(request())
        assert await first == target.answers(request(max_tokens=30, n=4))
        assert await second == target.answers(request(n=3))
        assert max(len(batch.rows) for batch in target.batches) == 4


async def test_the_metrics_count_a_prompt_once_and_every_answer() -> None:
    target = FakeTarget()
    metrics = Metrics()
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        await answers_of(coordinator, request(prompt=PROMPT, max_tokens=10, n=4))
        await all_tokens(coordinator, [request("another", max_tokens=5)])
    assert value_of(metrics, "vllm:prompt_tokens_total") == 22 + 5
    assert value_of(metrics, "vllm:time_to_first_token_seconds_count") == 2
    assert value_of(metrics, "vllm:inter_token_latency_seconds_count") == 45 - 5
    assert value_of(metrics, "vllm:request_success_total", finished_reason="length") == 5
    assert value_of(metrics, "pilotfish:forked_tokens_total") == 3 * 21
    assert value_of(metrics, "vllm:prefix_cache_queries_total") == 27
