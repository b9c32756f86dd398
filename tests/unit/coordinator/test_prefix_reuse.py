"""KV that the target has stored is found, shared and counted, and never changes a token."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.verification import OpenResult, OpenRow
from tests.support.fakes.fake_cluster import (
    all_tokens,
    configure,
    read,
    request,
    requests,
    serving,
    tokens_of,
    value_of,
)
from tests.support.fakes.fake_drafters import PerfectDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

LONG = tuple(range(1, 31))


async def test_a_prompt_that_was_computed_before_is_not_sent_again() -> None:
    target = FakeTarget(prefix_cache=True)
    async with serving(target, WrongDrafter(target)) as coordinator:
        first = await tokens_of(coordinator, request("one", LONG, seed=1))
        batches = len(target.batches)
        second = await tokens_of(coordinator, request("two", LONG, seed=2))
    assert [first, second] == [target.answer(request(prompt=LONG, seed=seed)) for seed in (1, 2)]
    assert [(found, len(row.tokens)) for row, found in target.openings] == [(0, 30), (28, 30)]  # blocks of four
    (row,) = target.batches[batches].rows
    assert (row.pending, row.start) == (LONG[28:], None)


async def test_a_conversation_continues_from_the_kv_of_its_last_turn() -> None:
    target = FakeTarget(prefix_cache=True)
    async with serving(target, PerfectDrafter(target)) as coordinator:
        first = request("one", LONG, max_tokens=20)
        answer = await tokens_of(coordinator, first)
        following = request("two", (*LONG, *answer, 9, 9), max_tokens=10)
        assert await tokens_of(coordinator, following) == target.answer(following)
    assert target.openings[1][1] == 48  # the last token of an answer is never stored
    assert target.accepted > 0


async def test_sequences_with_different_salts_share_nothing() -> None:
    target = FakeTarget(prefix_cache=True)
    async with serving(target, WrongDrafter(target)) as coordinator:
        for name, salt in (("one", "a"), ("two", "b"), ("three", ""), ("four", "a")):
            await tokens_of(coordinator, request(name, LONG, salt=salt))
    assert [found for _, found in target.openings] == [0, 0, 0, 28]
    assert [row.start.cache_salt for row, _ in target.openings] == ["a", "b", "", "a"]


async def test_sequences_admitted_together_are_opened_in_one_call() -> None:
    target = FakeTarget(prefix_cache=True)
    calls: list[int] = []
    plain = target.open

    async def counted(rows: Sequence[OpenRow]) -> OpenResult:
        calls.append(len(rows))
        return await plain(rows)

    target.open = counted  # type: ignore[method-assign]
    async with serving(target, WrongDrafter(target), scheduler__max_step_tokens=128) as coordinator:
        await all_tokens(coordinator, requests(4))
    assert calls == [4]


async def test_an_opening_whose_answer_is_lost_does_not_hide_what_was_stored() -> None:
    target = FakeTarget(prefix_cache=True)
    async with serving(target, WrongDrafter(target)) as coordinator:
        await tokens_of(coordinator, request("one", LONG))
        target.fail_after_computing = 1
        commits = await read(coordinator, request("two", LONG))
    assert commits[-1].usage is not None
    assert commits[-1].usage.cached_tokens == 28


async def test_hits_and_queries_are_counted_in_tokens_under_the_names_of_vllm() -> None:
    target = FakeTarget(prefix_cache=True)
    metrics = Metrics()
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        await tokens_of(coordinator, request("one", LONG))
        await tokens_of(coordinator, request("two", LONG))
    assert value_of(metrics, "vllm:prefix_cache_queries_total") == 60
    assert value_of(metrics, "vllm:prefix_cache_hits_total") == 28
    assert value_of(metrics, "pilotfish:resume_queries_total") == 0
