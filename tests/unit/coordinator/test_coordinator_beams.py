"""Beam search over the loop: what the search alone would find, whatever happens beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core import beam
from cluster.core.errors import DeadlineExceeded, InvalidRequest, NotReady
from cluster.core.ids import RequestId
from cluster.core.request import BeamParameters, EarlyStopping, FinishReason, GenerationRequest
from cluster.core.verification import StepBatch, StepResult, Verdict
from tests.support.fake_cluster import answers_of, configure, read, request, serving, tokens_of, until, value_of
from tests.support.fake_drafters import AlwaysAgree, FakeTarget, RandomGuesses

PROMPT = tuple(range(1, 15))
STOPS = frozenset({3, 7, 11})


def searching(
    name: str = "r",
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 8,
    *,
    width: int = 4,
    n: int = 2,
    stop: frozenset[int] = STOPS,
    penalty: float = 1.0,
    early: EarlyStopping = EarlyStopping.NO,
    deadline: float | None = None,
) -> GenerationRequest:
    parameters = BeamParameters(width, penalty, early)
    return request(name, prompt, max_tokens, stop=stop, n=n, beam=parameters, deadline=deadline)


def found(target: FakeTarget, wanted: GenerationRequest) -> list[list[int]]:
    """The answers of a search that sees the target's whole distribution at every step."""
    assert wanted.beam is not None
    state = beam.start(wanted.beam, wanted.stopping.max_tokens, wanted.stopping.stop_token_ids)
    while not beam.is_done(state):
        told = (target.logprobs([*wanted.prompt, *running.tokens]) for running in state.running)
        state = beam.advance(state, [list(enumerate(values)) for values in told])
    return [list(answer.tokens) for answer in beam.best(state, wanted.n)]


def freed(target: FakeTarget) -> bool:
    return not target.stored and target.blocks_free == target.blocks


# --- the answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize(("width", "n"), [(2, 1), (4, 3), (7, 7)])
async def test_the_answers_are_those_of_the_search_alone(width: int, n: int, early: EarlyStopping) -> None:
    target = FakeTarget()
    wanted = searching(width=width, n=n, early=early, penalty=0.7)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        assert await answers_of(coordinator, wanted) == found(target, wanted)
        await until(lambda: freed(target))
    assert not target.faults


@pytest.mark.parametrize("remembers", [False, True], ids=["plain", "remembers"])
async def test_searches_samples_and_answers_side_by_side_in_too_little_memory(remembers: bool) -> None:
    target = FakeTarget(blocks=16, remembers=remembers)
    searches = [searching(f"b{index}", range(index, index + 10), 20, width=3 + index) for index in range(3)]
    samples = [request(f"s{index}", PROMPT, 25, seed=index, n=3) for index in range(3)]
    async with serving(target, RandomGuesses(target), scheduler__max_sequences=8) as coordinator:
        answers = await asyncio.gather(*(answers_of(coordinator, one) for one in (*searches, *samples)))
        await until(lambda: freed(target))
    assert answers[:3] == [found(target, one) for one in searches]
    assert answers[3:] == [target.answers(one) for one in samples]


async def test_a_search_outlives_its_target() -> None:
    target = FakeTarget(step_delay=0.0005, remembers=True)
    wanted = searching(max_tokens=25, stop=frozenset())
    async with serving(target, AlwaysAgree(target)) as coordinator:
        reading = asyncio.create_task(answers_of(coordinator, wanted))
        for crashes in range(1, 5):
            await until(lambda count=crashes: len(target.batches) >= 5 * count)  # type: ignore[misc]
            target.crash()
            target.revive()
        assert await reading == found(target, wanted)
        await until(lambda: freed(target))


async def test_every_answer_comes_whole_with_its_own_usage() -> None:
    target = FakeTarget()
    wanted = searching(n=3)
    async with serving(target, AlwaysAgree(target)) as coordinator:
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
    wanted = searching(prompt=(1, 2), max_tokens=1, width=5, n=5, stop=frozenset())
    async with serving(target, AlwaysAgree(target)) as coordinator:
        answers = await answers_of(coordinator, wanted)
    assert [len(answer) for answer in answers] == [1, 1, 1, 0, 0]


# --- the work -----------------------------------------------------------------------------------


async def test_a_round_is_one_step_and_no_prompt_is_computed_twice() -> None:
    target = FakeTarget()
    drafter = AlwaysAgree(target)
    wanted = searching(max_tokens=10, width=4, stop=frozenset())
    async with serving(target, drafter) as coordinator:
        await answers_of(coordinator, wanted)
    assert [sum(row.width for row in batch.rows) for batch in target.batches] == [len(PROMPT)] + [4] * 9
    assert drafter.calls == []


async def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    target = FakeTarget(blocks=28, step_delay=0.0005)
    prompt = tuple(index % 32 for index in range(80))  # 20 blocks: without sharing there is room for one beam
    fewest = target.blocks
    metrics = Metrics()
    async with Coordinator(target, [AlwaysAgree(target)], configure(), metrics) as coordinator:
        wanted = searching(prompt=prompt, max_tokens=4, width=4, stop=frozenset())
        reading = asyncio.create_task(answers_of(coordinator, wanted))
        while not reading.done():
            fewest = min(fewest, target.blocks_free)
            await asyncio.sleep(0)
        assert await reading == found(target, wanted)
    assert value_of(metrics, "vllm:num_preemptions_total") == 0
    assert max(len(batch.rows) for batch in target.batches) == 4
    assert fewest >= 28 - 20 - 8


# --- ways out -----------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_every_beam_within_one_step() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, searching(max_tokens=400, stop=frozenset())))
        await until(lambda: len(target.batches) > 4)
        reading.cancel()
        steps = len(target.batches)
        await until(lambda: freed(target))
        assert len(target.batches) <= steps + 1
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))


async def test_abort_ends_all_answers_empty() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, searching("r", max_tokens=400, n=3, stop=frozenset())))
        await until(lambda: len(target.batches) > 4)
        assert not coordinator.conclude(RequestId("r"), 0)  # nothing of a search is anybody's answer yet
        assert coordinator.abort(RequestId("r"))
        commits = await reading
        assert [(commit.index, commit.tokens) for commit in commits] == [(0, ()), (1, ()), (2, ())]
        assert {commit.finish for commit in commits} == {FinishReason.ABORT}
        await until(lambda: freed(target))


async def test_a_deadline_ends_a_search() -> None:
    target = FakeTarget(step_delay=0.002)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        with pytest.raises(DeadlineExceeded):
            await read(coordinator, searching(max_tokens=400, stop=frozenset(), deadline=time.monotonic() + 0.05))
        await until(lambda: freed(target))


async def test_a_target_that_does_not_tell_the_alternatives_fails_the_search_alone() -> None:
    target = FakeTarget()
    plain = target.step

    async def silent(batch: StepBatch) -> StepResult:
        result = await plain(batch)
        told = [Verdict(one.sequence_id, one.base_len, one.tokens, one.drafted) for one in result.verdicts]
        return StepResult(tuple(told), result.kv)

    target.step = silent  # type: ignore[method-assign]
    async with serving(target, AlwaysAgree(target)) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, request("other")))
        with pytest.raises(NotReady):
            await read(coordinator, searching())
        assert await reading == target.answer(request("other"))
        await until(lambda: freed(target))


@pytest.mark.parametrize(("width", "n", "field"), [(33, 1, "beam.width"), (2, 3, "n"), (0, 1, "beam.width")])
async def test_a_search_that_could_not_be_served_is_refused(width: int, n: int, field: str) -> None:
    target = FakeTarget()
    async with serving(target, AlwaysAgree(target)) as coordinator:
        with pytest.raises(InvalidRequest) as refusal:
            await read(coordinator, searching(width=width, n=n))
    assert refusal.value.field == field
