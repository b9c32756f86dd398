"""What the target stores already is found, shared and counted, and never changes a token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import InvalidRequest, NotReady, TargetUnavailable
from cluster.core.kv import KvOccupancy
from cluster.core.verification import OpenResult, OpenRow, RowFault, RowFaultCode, StepBatch, StepResult, Verdict
from tests.support.fake_cluster import (
    all_tokens,
    answers_of,
    configure,
    request,
    requests,
    serving,
    tokens_of,
    until,
    value_of,
)
from tests.support.fake_drafters import AlwaysAgree, FakeDrafter, FakeTarget, NeverAgree, RandomGuesses

LONG = tuple(range(1, 31))


def freed(target: FakeTarget) -> bool:
    return target.blocks_free == target.blocks


# --- hits ---------------------------------------------------------------------------------------


async def test_a_prompt_that_was_computed_before_is_not_sent_again() -> None:
    target = FakeTarget(remembers=True)
    async with serving(target, NeverAgree(target)) as coordinator:
        first = await tokens_of(coordinator, request("one", LONG, seed=1))
        batches = len(target.batches)
        second = await tokens_of(coordinator, request("two", LONG, seed=2))
    assert [first, second] == [target.answer(request(prompt=LONG, seed=seed)) for seed in (1, 2)]
    assert [(found, len(row.tokens)) for row, found in target.openings] == [(0, 30), (28, 30)]  # blocks of four
    (row,) = target.batches[batches].rows
    assert (row.pending, row.start) == (LONG[28:], None)


async def test_a_conversation_goes_on_from_what_its_last_turn_stored() -> None:
    target = FakeTarget(remembers=True)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        turn = request("one", LONG, max_tokens=20)
        answer = await tokens_of(coordinator, turn)
        following = request("two", (*LONG, *answer, 9, 9), max_tokens=10)
        assert await tokens_of(coordinator, following) == target.answer(following)
    assert target.openings[1][1] == 48  # the last token of an answer is never stored


async def test_tenants_of_different_salts_share_nothing() -> None:
    target = FakeTarget(remembers=True)
    async with serving(target, NeverAgree(target)) as coordinator:
        for name, salt in (("one", "a"), ("two", "b"), ("three", ""), ("four", "a")):
            await tokens_of(coordinator, request(name, LONG, salt=salt))
    assert [found for _, found in target.openings] == [0, 0, 0, 28]
    assert [row.start.cache_salt for row, _ in target.openings] == ["a", "b", "", "a"]


async def test_those_who_are_admitted_together_are_opened_in_one_call() -> None:
    target = FakeTarget(remembers=True)
    calls: list[int] = []
    plain = target.open

    async def counted(rows: Sequence[OpenRow]) -> OpenResult:
        calls.append(len(rows))
        return await plain(rows)

    target.open = counted  # type: ignore[method-assign]
    async with serving(target, NeverAgree(target), scheduler__max_step_tokens=128) as coordinator:
        await all_tokens(coordinator, requests(4))
    assert calls == [4]


async def test_an_opening_is_split_before_it_outgrows_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.clients.target.MAX_OPENED_TOKENS", 20)
    target = FakeTarget()
    calls: list[list[int]] = []
    plain = target.open

    async def measured(rows: Sequence[OpenRow]) -> OpenResult:
        calls.append([len(row.tokens) for row in rows])
        return await plain(rows)

    target.open = measured  # type: ignore[method-assign]
    wanted = [request(f"r{length}", range(length), max_tokens=2) for length in (8, 9, 10, 25, 4)]
    async with serving(target, NeverAgree(target), scheduler__max_step_tokens=128) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert calls == [[8, 9], [10], [25], [4]]


async def test_hits_and_queries_are_counted_in_tokens_under_vllms_names() -> None:
    target = FakeTarget(remembers=True)
    metrics = Metrics()
    async with Coordinator(target, [NeverAgree(target)], configure(), metrics) as coordinator:
        await tokens_of(coordinator, request("one", LONG))
        await tokens_of(coordinator, request("two", LONG))
    assert value_of(metrics, "vllm:prefix_cache_queries_total") == 60
    assert value_of(metrics, "vllm:prefix_cache_hits_total") == 28
    assert value_of(metrics, "pilotfish:resume_queries_total") == 0


# --- preemption and loss ------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [NeverAgree, AlwaysAgree, RandomGuesses])
async def test_under_more_demand_than_memory_everything_finishes_and_every_text_is_right(
    drafter: type[FakeDrafter],
) -> None:
    target = FakeTarget(blocks=14, remembers=True)
    metrics = Metrics()
    shared = [request(f"s{index}", LONG[:13], max_tokens=40, seed=index) for index in range(10)]
    alone = [request(f"a{index}", range(index, index + 9), max_tokens=40, seed=index) for index in range(10)]
    wanted = [*shared, *alone]
    random.Random(1).shuffle(wanted)
    async with Coordinator(target, [drafter(target)], configure(), metrics) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
        await until(lambda: freed(target))
    assert value_of(metrics, "vllm:num_preemptions_total") > 0


async def test_a_preempted_sequence_resumes_from_what_is_still_stored() -> None:
    target = FakeTarget(blocks=12, remembers=True)
    metrics = Metrics()
    wanted = [request("old", LONG[:8], max_tokens=32), request("young", LONG[10:18], max_tokens=32)]
    async with Coordinator(target, [NeverAgree(target)], configure(), metrics) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert value_of(metrics, "vllm:num_preemptions_total") >= 1
    asked, found = (value_of(metrics, f"pilotfish:resume_{name}_total") for name in ("queries", "hits"))
    assert 0 < found < asked
    assert value_of(metrics, "vllm:prefix_cache_queries_total") == 16  # a resumption is no new query


async def test_a_sequence_that_fell_out_of_step_is_opened_again() -> None:
    target = FakeTarget(remembers=True)
    plain, lies = target.step, iter(range(1))

    async def lying(batch: StepBatch) -> StepResult:
        result = await plain(batch)
        if len(target.batches) > 3 and next(lies, None) is not None:
            return StepResult((Verdict(batch.rows[0].sequence_id, 1, tokens=(1,)),), result.kv)
        return result

    target.step = lying  # type: ignore[method-assign]
    async with serving(target, NeverAgree(target)) as coordinator:
        wanted = request(prompt=LONG)
        assert await tokens_of(coordinator, wanted) == target.answer(wanted)
    assert [found > 0 for _, found in target.openings] == [False, True]


async def test_an_opening_whose_answer_is_lost_is_repeated() -> None:
    target = FakeTarget(remembers=True)
    metrics = Metrics()
    async with Coordinator(target, [NeverAgree(target)], configure(), metrics) as coordinator:
        target.fail_after_computing = 1
        assert await tokens_of(coordinator, request()) == target.answer(request())
        await until(lambda: freed(target))
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
    async with serving(target, NeverAgree(target), target__step_timeout_seconds=0.02) as coordinator:
        assert await tokens_of(coordinator, request()) == target.answer(request())


async def test_a_row_that_cannot_be_opened_is_found_out_and_sent_from_the_start() -> None:
    target = FakeTarget(remembers=True)
    plain = target.open

    async def strict(rows: Sequence[OpenRow]) -> OpenResult:
        if any(13 in row.tokens for row in rows):
            raise InvalidRequest("rows", 13, "another number")
        return await plain(rows)

    target.open = strict  # type: ignore[method-assign]
    wanted = [request(f"r{index}", (*LONG[:8], index + 10), seed=index) for index in range(6)]
    async with serving(target, NeverAgree(target)) as coordinator:
        await tokens_of(coordinator, request("before", LONG[:9]))
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
    assert [found for _, found in target.openings[1:]] == [8] * 5


async def test_an_answer_to_an_opening_that_makes_no_sense_costs_time_and_nothing_else() -> None:
    target = FakeTarget()
    lies = iter([(99,), (), (5,), (0, 0)])

    async def lying(rows: Sequence[OpenRow]) -> OpenResult:
        return OpenResult(next(lies), KvOccupancy(target.blocks, target.blocks_free))

    target.open = lying  # type: ignore[method-assign]
    async with serving(target, NeverAgree(target)) as coordinator:
        for name in "abcd":
            assert await tokens_of(coordinator, request(name)) == target.answer(request())


async def test_an_opening_that_takes_the_target_down_is_given_up_and_the_request_is_served_without() -> None:
    target = FakeTarget(remembers=True)
    poison = request("poison", (9, 9, 9), max_tokens=4)
    plain = target.open

    async def fragile(rows: Sequence[OpenRow]) -> OpenResult:
        if any(row.tokens[:3] == poison.prompt for row in rows):
            target.crash()
            target.revive()
            raise TargetUnavailable("it went down")
        return await plain(rows)

    target.open = fragile  # type: ignore[method-assign]
    wanted = [*requests(3, max_tokens=6), poison]
    async with serving(target, AlwaysAgree(target)) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]


@pytest.mark.parametrize("seed", range(3))
async def test_streams_are_the_same_when_a_target_that_remembers_crashes_at_random(seed: int) -> None:
    luck = random.Random(seed)
    target = FakeTarget(blocks=30, step_delay=0.0005, remembers=True)
    wanted = [request(f"r{index}", LONG[: 5 + 3 * (index % 4)], max_tokens=40, seed=index, n=2) for index in range(6)]
    singles = [request(f"q{index}", LONG[: 4 + index], max_tokens=40, seed=index) for index in range(4)]
    async with serving(target, RandomGuesses(target)) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, singles))
        forked = asyncio.gather(*(answers_of(coordinator, one) for one in wanted))
        for _ in range(15):
            await asyncio.sleep(luck.uniform(0, 0.02))
            match luck.randrange(3):
                case 0:
                    target.crash()
                    await asyncio.sleep(luck.uniform(0, 0.005))
                    target.revive()
                case 1:
                    target.revive()
                case 2:
                    target.fail_after_computing = 1
        assert await reading == [target.answer(one) for one in singles]
        assert await forked == [target.answers(one) for one in wanted]
        await until(lambda: freed(target))


async def test_what_no_longer_fits_a_target_that_came_back_smaller_is_told_so_and_blocks_nobody() -> None:
    target = FakeTarget(blocks=20, step_delay=0.001)
    large, small = request("large", max_tokens=60), request("small", max_tokens=20)
    async with serving(target, NeverAgree(target)) as coordinator:
        reading = [asyncio.create_task(tokens_of(coordinator, one)) for one in (large, small)]
        await until(lambda: len(target.batches) > 3)
        target.crash()
        target.memory.blocks = 10
        target.revive()
        with pytest.raises(NotReady, match="KV pool holds 40 tokens"):
            await reading[0]
        assert await reading[1] == target.answer(small)
        await until(lambda: freed(target))


# --- the drafter --------------------------------------------------------------------------------


class Refusing(AlwaysAgree):
    """Cannot serve prompts that begin with 13."""

    def answer(self, row: DraftRow) -> Proposal:
        """Refuse, or guess."""
        if row.new_tokens[:1] == (13,):
            return Proposal(row.sequence_id, row.base_len, fault=RowFault(RowFaultCode.INVALID, "too long for me"))
        return super().answer(row)


async def test_a_drafter_that_cannot_serve_a_sequence_is_asked_for_it_once() -> None:
    target = FakeTarget()
    drafter = Refusing(target)
    wanted = [request("hard", (13, 1, 2)), request("easy", (1, 2, 3), max_tokens=20)]
    async with serving(target, drafter) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
        again = request("again", (13, 4))
        assert await tokens_of(coordinator, again) == target.answer(again)
    refused = [row.sequence_id for call in drafter.calls for row in call if row.new_tokens[:1] == (13,)]
    assert len(refused) == len(set(refused)) == 2
    assert max(len(call) for call in drafter.calls[1:]) == 1
