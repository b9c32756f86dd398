"""The loop over fakes: every drafter leads to the same text, and every way out of a request frees what it held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from cluster.core.ids import RequestId
from cluster.core.request import Commit, FinishReason
from tests.support.fake_cluster import (
    all_tokens,
    configure,
    first_commit_then_leave,
    read,
    request,
    requests,
    serving,
    tokens_of,
    until,
    value_of,
)
from tests.support.fake_drafters import (
    AlwaysAgree,
    Broken,
    Failing,
    FakeDrafter,
    FakeTarget,
    Liar,
    NeverAgree,
    OutOfSync,
    RandomGuesses,
    Slow,
)

DRAFTERS: dict[str, Callable[[FakeTarget], FakeDrafter]] = {
    "always agrees": AlwaysAgree,
    "never agrees": NeverAgree,
    "guesses at random": RandomGuesses,
    "is late": lambda target: Slow(target, 0.02),
    "is gone": Failing,
    "has a bug": Broken,
    "forgets": OutOfSync,
    "lies": Liar,
}


# --- the text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("character", DRAFTERS)
async def test_the_text_is_that_of_plain_decoding_whatever_the_drafter_is_like(
    character: str, batch: int, temperature: float
) -> None:
    target = FakeTarget()
    drafter = DRAFTERS[character](target)
    wanted = requests(batch, temperature=temperature)
    async with serving(target, drafter, draft__timeout_seconds=0.005) as coordinator:
        answers = await all_tokens(coordinator, wanted)
    assert answers == [target.answer(one) for one in wanted]
    assert target.blocks_free == target.blocks
    assert not target.faults


async def test_a_good_drafter_saves_steps_and_the_usage_tells() -> None:
    target = FakeTarget()
    async with serving(target, AlwaysAgree(target)) as coordinator:
        commits = await read(coordinator, request(max_tokens=20))
    usage = commits[-1].usage
    assert usage is not None
    assert len(target.batches) == usage.target_steps == 4  # five at a time: four guessed, one the target's own
    assert usage.accepted_tokens == sum(commit.accepted for commit in commits) == 16
    assert usage.completion_tokens == 20
    assert [commit.finish for commit in commits] == [None, None, None, FinishReason.LENGTH]


async def test_an_answer_ends_at_its_stop_token() -> None:
    target = FakeTarget()
    whole = target.answer(request(max_tokens=20))
    async with serving(target, AlwaysAgree(target)) as coordinator:
        commits = await read(coordinator, request(max_tokens=20, stop=frozenset({whole[7]})))
    assert [token for commit in commits for token in commit.tokens] == whole[: whole.index(whole[7]) + 1]
    assert commits[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("overrides", [{"draft__method": "none"}, {"draft__max_nodes": 0}], ids=str)
async def test_without_a_drafting_method_no_propose_is_sent(overrides: dict[str, object]) -> None:
    target = FakeTarget()
    drafter = AlwaysAgree(target)
    async with serving(target, drafter, **overrides) as coordinator:
        assert await tokens_of(coordinator, request()) == target.answer(request())
    assert drafter.calls == []
    assert len(target.batches) == 12


async def test_every_step_and_every_tree_keeps_its_budget() -> None:
    target = FakeTarget()
    async with serving(target, Liar(target)) as coordinator:
        await all_tokens(coordinator, requests(8))
    for batch in target.batches:
        assert sum(row.width for row in batch.rows) <= 32
        assert all(len(row.tree) <= 6 and row.tree.depth() <= 4 for row in batch.rows)


async def test_the_drafter_is_asked_only_for_rows_that_decide_and_told_only_what_is_new() -> None:
    target = FakeTarget()
    drafter = NeverAgree(target)
    async with serving(target, drafter) as coordinator:
        await tokens_of(coordinator, request(prompt=range(1, 31), max_tokens=5))  # wider than half a step
    rows = [row for call in drafter.calls for row in call]
    undecided = sum(not row.decide for batch in target.batches for row in batch.rows)
    assert len(target.batches) - undecided == 5
    assert [len(row.new_tokens) for row in rows] == [30, 1, 1, 1]  # nothing to guess before the last token
    assert [row.start is not None for row in rows] == [True, False, False, False]


async def test_several_requests_share_one_propose_and_one_step() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = AlwaysAgree(target)
    async with serving(target, drafter, scheduler__max_step_tokens=128) as coordinator:
        await all_tokens(coordinator, [request(f"r{index}", max_tokens=20) for index in range(8)])
    assert max(len(batch.rows) for batch in target.batches) == 8
    assert max(len(call) for call in drafter.calls) == 8


# --- ways out -----------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_everything_within_one_step() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = AlwaysAgree(target)
    async with serving(target, drafter) as coordinator:
        await first_commit_then_leave(coordinator, request(max_tokens=400))
        steps = len(target.batches)
        await until(lambda: target.blocks_free == target.blocks and not drafter.known)
        assert len(target.batches) <= steps + 1


async def test_a_cancelled_reader_frees_everything() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = AlwaysAgree(target)
    async with serving(target, drafter) as coordinator:
        reader = asyncio.create_task(read(coordinator, request(max_tokens=400)))
        await until(lambda: len(target.batches) > 2)
        reader.cancel()
        await until(lambda: target.blocks_free == target.blocks and not drafter.known)


async def test_the_others_go_on_when_one_leaves() -> None:
    target = FakeTarget()
    wanted = requests(4)
    async with serving(target, RandomGuesses(target)) as coordinator:
        leaving = first_commit_then_leave(coordinator, request("leaver", max_tokens=100))
        answers, _ = await asyncio.gather(all_tokens(coordinator, wanted), leaving)
    assert answers == [target.answer(one) for one in wanted]


async def test_abort_ends_a_running_stream_with_its_usage() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        commits: list[Commit] = []
        async for commit in coordinator.generate(request("r", max_tokens=400)):
            commits.append(commit)
            if len(commits) == 2:
                assert coordinator.abort(RequestId("r"))
        assert commits[-1].finish is FinishReason.ABORT
        assert commits[-1].usage is not None
        assert commits[-1].usage.completion_tokens == sum(len(commit.tokens) for commit in commits)
        await until(lambda: target.blocks_free == target.blocks)
        assert not coordinator.abort(RequestId("r"))


async def test_abort_ends_a_waiting_stream_too() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, NeverAgree(target), scheduler__max_sequences=1) as coordinator:
        runner = asyncio.create_task(read(coordinator, request("runs", max_tokens=400)))
        waiter = asyncio.create_task(read(coordinator, request("waits")))
        await until(lambda: len(target.batches) > 2)
        assert coordinator.abort(RequestId("waits"))
        (last,) = await waiter
        assert last.finish is FinishReason.ABORT and last.tokens == ()
        coordinator.abort(RequestId("runs"))
        await runner


async def test_a_deadline_ends_the_stream_and_frees_everything() -> None:
    target = FakeTarget(step_delay=0.005)
    drafter = NeverAgree(target)
    async with serving(target, drafter) as coordinator:
        with pytest.raises(DeadlineExceeded):
            await read(coordinator, request(max_tokens=400, deadline=time.monotonic() + 0.03))
        await until(lambda: target.blocks_free == target.blocks and not drafter.known)


async def test_a_deadline_passes_while_the_reader_sleeps() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, NeverAgree(target)) as coordinator:
        wanted = request(max_tokens=400, deadline=time.monotonic() + 0.03)
        async with aclosing(coordinator.generate(wanted)) as commits:
            await anext(commits)
            await until(lambda: target.blocks_free == target.blocks)
            with pytest.raises(DeadlineExceeded):
                async for _ in commits:
                    pass


async def test_a_deadline_that_has_passed_is_refused_at_once() -> None:
    target = FakeTarget()
    async with serving(target, NeverAgree(target)) as coordinator:
        with pytest.raises(DeadlineExceeded):
            await read(coordinator, request(deadline=time.monotonic() - 1))
    assert target.batches == []


# --- refusals -----------------------------------------------------------------------------------


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    target = FakeTarget(step_delay=0.001)
    limits = {"scheduler__max_sequences": 1, "scheduler__max_waiting": 2}
    async with serving(target, NeverAgree(target), **limits) as coordinator:
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
        (64, 1, "prompt", "context of 64"),
        (60, 5, "max_tokens", "at most 4"),
        (30, 11, "max_tokens", "KV pool holds 40"),
    ],
)
async def test_what_can_never_fit_is_refused_naming_the_bound(
    prompt_len: int, max_tokens: int, field: str, words: str
) -> None:
    target = FakeTarget(blocks=10 if "pool" in words else 100, max_context_len=64)
    async with serving(target, NeverAgree(target)) as coordinator:
        with pytest.raises(InvalidRequest) as refusal:
            await read(coordinator, request(prompt=[1] * prompt_len, max_tokens=max_tokens))
    assert refusal.value.field == field
    assert words in str(refusal.value)
    assert target.batches == []


async def test_two_live_requests_cannot_have_one_name() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, NeverAgree(target)) as coordinator:
        async with aclosing(coordinator.generate(request("same", max_tokens=100))) as commits:
            await anext(commits)
            with pytest.raises(InvalidRequest, match="request_id"):
                await read(coordinator, request("same"))
        assert await tokens_of(coordinator, request("same")) == target.answer(request())


# --- life ---------------------------------------------------------------------------------------


async def test_before_the_start_and_after_the_stop_requests_are_refused() -> None:
    target = FakeTarget()
    coordinator = Coordinator(target, [AlwaysAgree(target)], configure(), Metrics())
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


async def test_stopping_lets_accepted_answers_end_and_takes_no_new_ones() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = requests(3)
    async with serving(target, NeverAgree(target), scheduler__max_sequences=2) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, wanted))
        await until(lambda: len(target.batches) > 1)
        stopping = asyncio.create_task(coordinator.stop(30.0))
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            await read(coordinator, request("late"))
        assert await reading == [target.answer(one) for one in wanted]
        await stopping
    assert target.blocks_free == target.blocks


async def test_what_does_not_end_within_the_drain_is_told_so_and_freed() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = AlwaysAgree(target)
    async with serving(target, drafter) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=500)))
        await until(lambda: len(target.batches) > 1)
        await coordinator.stop(0.01)
        with pytest.raises(NotReady):
            await reading
    assert target.blocks_free == target.blocks
    assert not drafter.known


async def test_an_idle_coordinator_asks_nothing_of_anybody() -> None:
    target = FakeTarget()
    calls = 0
    plain = target.info

    async def counted() -> object:
        nonlocal calls
        calls += 1
        return await plain()

    async with serving(target, AlwaysAgree(target)) as coordinator:
        await tokens_of(coordinator, request())
        await until(lambda: target.blocks_free == target.blocks)
        await asyncio.sleep(0.02)
        target.info = counted  # type: ignore[method-assign, assignment]
        steps = len(target.batches)
        await asyncio.sleep(0.05)
        assert (calls, len(target.batches)) == (0, steps)
        assert await tokens_of(coordinator, request("again")) == target.answer(request())


# --- metrics ------------------------------------------------------------------------------------


async def test_the_metrics_say_what_happened_under_vllms_names() -> None:
    target = FakeTarget()
    metrics = Metrics()
    async with Coordinator(target, [AlwaysAgree(target)], configure(), metrics) as coordinator:
        await all_tokens(coordinator, [request(f"r{index}", max_tokens=20) for index in range(2)])
        await first_commit_then_leave(coordinator, request("leaves", max_tokens=100))
        text = metrics.exposition()[0].decode()
    assert value_of(metrics, "vllm:prompt_tokens_total") == 15
    assert value_of(metrics, "vllm:generation_tokens_total") >= 40
    assert value_of(metrics, "vllm:request_success_total", finished_reason="length") == 2
    assert value_of(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value_of(metrics, "vllm:time_to_first_token_seconds_count") == 3
    assert value_of(metrics, "vllm:e2e_request_latency_seconds_count") == 3
    accepted = value_of(metrics, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == value_of(metrics, "vllm:spec_decode_num_draft_tokens_total") >= 32
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:num_preemptions_total",
        "vllm:spec_decode_num_drafts_total",
        "pilotfish:committed_tokens_per_step_bucket",
        "pilotfish:propose_latency_seconds_count",
        "pilotfish:step_latency_seconds_count",
        "pilotfish:round_overhead_seconds_count",
    ):
        assert f'{name}{{model_name="fake"' in text or f"{name}{{le=" in text, name
