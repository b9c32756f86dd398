"""Beam search in the coordinator gives the answers of the pure search, also among other requests and failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.errors import InvalidRequest, WorkerUnavailable
from cluster.core.ids import RequestId
from cluster.core.request import EarlyStopping, FinishReason
from cluster.core.verification import StepBatch, StepResult, Verdict
from tests.support.fakes.beam_requests import beam_answers, beam_request
from tests.support.fakes.fake_cluster import answers_of, configure, read, request, serving, tokens_of, until, value_of
from tests.support.fakes.fake_drafters import PerfectDrafter, RandomDrafter
from tests.support.fakes.fake_target import FakeTarget

PROMPT = tuple(range(1, 15))
STOPS = frozenset({3, 7, 11})


# --- the answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize(("width", "n"), [(2, 1), (4, 3), (7, 7)])
async def test_the_answers_are_those_of_the_pure_search(width: int, n: int, early: EarlyStopping) -> None:
    target = FakeTarget()
    wanted = beam_request(width=width, n=n, early=early, penalty=0.7)
    async with serving(target, PerfectDrafter(target)) as coordinator:
        assert await answers_of(coordinator, wanted) == beam_answers(target, wanted)
        await until(lambda: target.is_empty)
    assert not target.faults


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix_cache"])
async def test_searches_and_samples_run_together_in_too_little_memory(prefix_cache: bool) -> None:
    target = FakeTarget(blocks=16, prefix_cache=prefix_cache)
    searches = [beam_request(f"b{index}", range(index, index + 10), 20, width=3 + index) for index in range(3)]
    samples = [request(f"s{index}", PROMPT, 25, seed=index, n=3) for index in range(3)]
    async with serving(target, RandomDrafter(target), scheduler__max_sequences=8) as coordinator:
        answers = await asyncio.gather(*(answers_of(coordinator, one) for one in (*searches, *samples)))
        await until(lambda: target.is_empty)
    assert answers[:3] == [beam_answers(target, one) for one in searches]
    assert answers[3:] == [target.answers(one) for one in samples]


async def test_no_beam_contains_a_bad_word() -> None:
    target = FakeTarget()
    wanted = beam_request(width=3, n=3)
    async with serving(target, PerfectDrafter(target)) as coordinator:
        free = await answers_of(coordinator, wanted)
        bad_words = ((free[0][0],), tuple(free[1][-3:-1]))
        bad = replace(wanted, sampling=replace(wanted.sampling, bad_words=bad_words))
        found = await answers_of(coordinator, bad)
    assert all(answer[0] != free[0][0] for answer in found)
    assert not any(
        tuple(answer[index : index + len(word)]) == word
        for answer in found
        for word in bad_words
        for index in range(len(answer))
    )


async def test_a_search_survives_crashes_of_its_target() -> None:
    target = FakeTarget(step_delay=0.0005, prefix_cache=True)
    wanted = beam_request(max_tokens=25, stop=frozenset())
    async with serving(target, PerfectDrafter(target)) as coordinator:
        reading = asyncio.create_task(answers_of(coordinator, wanted))
        for crashes in range(1, 5):
            await until(lambda count=crashes: len(target.batches) >= 5 * count)  # type: ignore[misc]
            target.crash()
            target.revive()
        assert await reading == beam_answers(target, wanted)
        await until(lambda: target.is_empty)


async def test_every_answer_is_one_commit_with_its_own_usage() -> None:
    target = FakeTarget()
    wanted = beam_request(n=3)
    async with serving(target, PerfectDrafter(target)) as coordinator:
        commits = await read(coordinator, wanted)
    assert [commit.index for commit in commits] == [0, 1, 2]
    rounds = {commit.usage.target_steps for commit in commits if commit.usage is not None}
    assert len(rounds) == 1
    for commit in commits:
        assert commit.usage is not None
        assert (commit.usage.prompt_tokens, commit.usage.completion_tokens) == (len(PROMPT), len(commit.tokens))
        assert commit.usage.drafted_tokens == 0
        assert commit.finish is (FinishReason.STOP if commit.tokens[-1] in STOPS else FinishReason.LENGTH)


async def test_answers_that_do_not_exist_are_empty() -> None:
    target = FakeTarget(vocabulary_size=3)
    wanted = beam_request(prompt=(1, 2), max_tokens=1, width=5, n=5, stop=frozenset())
    async with serving(target, PerfectDrafter(target)) as coordinator:
        answers = await answers_of(coordinator, wanted)
    assert [len(answer) for answer in answers] == [1, 1, 1, 0, 0]


# --- the steps ----------------------------------------------------------------------------------


async def test_a_search_round_is_one_step_and_no_prompt_is_computed_twice() -> None:
    target = FakeTarget()
    drafter = PerfectDrafter(target)
    wanted = beam_request(max_tokens=10, width=4, stop=frozenset())
    async with serving(target, drafter) as coordinator:
        await answers_of(coordinator, wanted)
    assert [sum(row.width for row in batch.rows) for batch in target.batches] == [len(PROMPT)] + [4] * 9
    assert drafter.calls == []


async def test_beams_share_the_blocks_of_their_common_prefix() -> None:
    target = FakeTarget(blocks=28, step_delay=0.0005)
    prompt = tuple(index % 32 for index in range(80))  # 20 blocks: without sharing there is room for one beam
    fewest = target.blocks
    metrics = Metrics()
    async with Coordinator(target, [PerfectDrafter(target)], configure(), metrics) as coordinator:
        wanted = beam_request(prompt=prompt, max_tokens=4, width=4, stop=frozenset())
        reading = asyncio.create_task(answers_of(coordinator, wanted))
        while not reading.done():
            fewest = min(fewest, target.blocks_free)
            await asyncio.sleep(0)
        assert await reading == beam_answers(target, wanted)
    assert value_of(metrics, "vllm:num_preemptions_total") == 0
    assert max(len(batch.rows) for batch in target.batches) == 4
    assert fewest >= 28 - 20 - 8


# --- early ends ---------------------------------------------------------------------------------


async def test_abort_ends_all_answers_of_a_search_empty() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, PerfectDrafter(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, beam_request("r", max_tokens=400, n=3, stop=frozenset())))
        await until(lambda: len(target.batches) > 4)
        assert not coordinator.conclude(RequestId("r"), 0)  # a search has no answer yet
        assert coordinator.abort(RequestId("r"))
        commits = await reading
        assert [(commit.index, commit.tokens) for commit in commits] == [(0, ()), (1, ()), (2, ())]
        assert {commit.finish for commit in commits} == {FinishReason.ABORT}
        await until(lambda: target.is_empty)


async def test_a_target_that_reports_no_alternatives_fails_only_the_search() -> None:
    target = FakeTarget()
    plain = target.step

    async def silent(batch: StepBatch) -> StepResult:
        result = await plain(batch)
        without = [Verdict(one.sequence_id, one.base_len, one.tokens, one.drafted) for one in result.verdicts]
        return StepResult(tuple(without), result.kv)

    target.step = silent  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, request("other")))
        with pytest.raises(WorkerUnavailable):
            await read(coordinator, beam_request())
        assert await reading == target.answer(request("other"))
        await until(lambda: target.is_empty)


@pytest.mark.parametrize(("width", "n", "field"), [(33, 1, "beam.width"), (2, 3, "n"), (0, 1, "beam.width")])
async def test_a_search_that_cannot_be_served_is_refused(width: int, n: int, field: str) -> None:
    target = FakeTarget()
    async with serving(target, PerfectDrafter(target)) as coordinator:
        with pytest.raises(InvalidRequest) as refusal:
            await read(coordinator, beam_request(width=width, n=n))
    assert refusal.value.field == field
