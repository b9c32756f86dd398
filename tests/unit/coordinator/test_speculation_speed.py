"""Speculation in simulated time: never slower than plain decoding, and nearly as fast as the drafter allows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache

import pytest

from cluster.core.verification import StepBatch, StepResult, TargetInfo
from tests.support.fakes.fake_cluster import request
from tests.support.fakes.simulated_time import (
    DrafterModel,
    DraftingTarget,
    SimulatedCluster,
    StepTime,
    TimedDrafter,
    TimedTarget,
    cpu_step,
    equal_requests,
    gpu_step,
    simulate,
    tokens_per_second,
)

pytestmark = pytest.mark.slow

NEVER_SLOWER = 0.97


BAD = {
    "sends empty trees": DrafterModel(0.0, empty=1.0),
    "is always wrong": DrafterModel(0.0),
    "is often empty and often wrong": DrafterModel(0.5, empty=0.8),
    "is slow": DrafterModel(0.4, depth_seconds=0.003, has_probabilities=True),
    "is wrong and takes its time": DrafterModel(0.1, row_seconds=0.0002, depth_seconds=0.001),
}


GOOD = {
    "is quick": DrafterModel(0.7, call_seconds=0.0003, row_seconds=0.00001, has_probabilities=True),
    "is quick without probabilities": DrafterModel(0.8, call_seconds=0.0003, row_seconds=0.00001),
    "is slow but right": DrafterModel(0.8, depth_seconds=0.0012, has_probabilities=True),
}


@cache
def plain(step_time: StepTime, batch: int, tokens: int) -> float:
    return simulate(tokens_per_second(step_time, None, batch, tokens))


@pytest.mark.parametrize(("step_time", "batch"), [(cpu_step, 1), (cpu_step, 8), (gpu_step, 4)])
@pytest.mark.parametrize("character", BAD)
def test_a_bad_drafter_costs_next_to_nothing(character: str, step_time: StepTime, batch: int) -> None:
    assert simulate(tokens_per_second(step_time, BAD[character], batch, 150)) >= NEVER_SLOWER * plain(
        step_time, batch, 150
    )


def test_a_large_batch_is_as_fast_as_plain_decoding_with_a_good_drafter() -> None:
    speed = simulate(tokens_per_second(cpu_step, GOOD["is slow but right"], 32, 50))
    assert speed >= NEVER_SLOWER * plain(cpu_step, 32, 50)


def test_the_step_time_is_learned_without_a_profile() -> None:
    speed = simulate(tokens_per_second(cpu_step, BAD["is always wrong"], 8, 150, profiled=False))
    assert speed >= NEVER_SLOWER * plain(cpu_step, 8, 150)


@pytest.mark.parametrize(("step_time", "batch"), [(cpu_step, 1), (gpu_step, 4)])
@pytest.mark.parametrize("character", GOOD)
def test_a_good_drafter_is_nearly_as_fast_as_with_the_best_fixed_length(
    character: str, step_time: StepTime, batch: int
) -> None:
    model = GOOD[character]
    fixed = [
        simulate(
            tokens_per_second(
                step_time, model, batch, 120, draft__controller="off", draft__max_nodes=k, draft__max_depth=k
            )
        )
        for k in (2, 4, 8)
    ]
    assert simulate(tokens_per_second(step_time, model, batch, 120, before=200)) >= 0.87 * max(fixed)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_first_answers_have_drafts(batch: int) -> None:
    speed = simulate(tokens_per_second(gpu_step, GOOD["is quick"], batch, 60))
    assert speed >= 1.4 * plain(gpu_step, batch, 60)


USELESS_ON_TARGET = {
    "reads layers of the target": DrafterModel(0.25, call_seconds=0.001, row_seconds=0.0002, depth_seconds=0.0022),
    "computes heads": DrafterModel(0.15, call_seconds=0.0029, row_seconds=0.0002),
    "looks up": DrafterModel(0.1, call_seconds=0.0008, row_seconds=0.00004),
    "is always wrong": DrafterModel(0.0, call_seconds=0.003, row_seconds=0.0001),
}


async def seconds_of_answers(target: TimedTarget, batch: int, count: int, **settings: object) -> float:
    """The time of `count` times `batch` answers of 48 tokens, with nothing known at first."""
    cluster = SimulatedCluster([], target, draft__max_nodes=7, draft__max_depth=7, **settings)
    async with cluster.coordinator:
        return sum([await cluster.serve(equal_requests(batch, 48, f"{index}-")) for index in range(count)])


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("character", USELESS_ON_TARGET)
def test_useless_drafts_on_the_target_cost_at_most_three_percent(character: str, batch: int) -> None:
    settings: dict[str, object] = {"draft__method": "ngram", "draft__placement": "target"}
    target = DraftingTarget(cpu_step, USELESS_ON_TARGET[character])
    count = 8 if batch == 1 else 4
    without = simulate(seconds_of_answers(TimedTarget(cpu_step), batch, count, draft__method="none"))
    assert without >= NEVER_SLOWER * simulate(seconds_of_answers(target, batch, count, **settings))
    assert target.drafted  # drafts were tried


async def seconds_of_crowds(target: TimedTarget, **settings: object) -> float:
    """The time of eight answers at once, twice, after an answer alone. Of five such turns the last two count."""
    cluster = SimulatedCluster([], target, draft__max_nodes=7, draft__max_depth=7, **settings)
    prompt, seconds = [1 + token % 40 for token in range(90)], []
    async with cluster.coordinator:
        for turn in range(5):
            await cluster.serve([request(f"{turn}-alone", prompt, max_tokens=32)])
            crowd = [request(f"{turn}-{name}", prompt, max_tokens=12 + 4 * (name % 6)) for name in range(16)]
            seconds.append(await cluster.serve(crowd[:8]) + await cluster.serve(crowd[8:]))
    return sum(seconds[3:])


def test_drafts_that_pay_for_one_answer_alone_do_not_slow_eight_down() -> None:
    """A first draft also reads the prompt: it is not asked for where few tokens are left or drafts do not pay."""
    target = DraftingTarget(cpu_step, DrafterModel(0.6, call_seconds=0.001, row_seconds=0.0008))
    without = simulate(seconds_of_crowds(TimedTarget(cpu_step), draft__method="none"))
    on_target: dict[str, object] = {"draft__method": "ngram", "draft__placement": "target"}
    assert without >= NEVER_SLOWER * simulate(seconds_of_crowds(target, **on_target))
    assert target.accepted


def test_eight_answers_that_begin_after_a_drafted_one_have_no_drafts_before_their_gain_is_known() -> None:
    async def seconds(target: TimedTarget, **settings: object) -> float:
        cluster = SimulatedCluster([], target, draft__max_nodes=7, draft__max_depth=7, **settings)
        async with cluster.coordinator:
            await cluster.serve(equal_requests(1, 64, "alone"))
            return sum([await cluster.serve(equal_requests(8, 32, f"{turn}-")) for turn in range(3)])

    model = DrafterModel(0.8, call_seconds=0.003, row_seconds=0.0008, depth_seconds=0.0003)
    target = DraftingTarget(cpu_step, model)
    without = simulate(seconds(TimedTarget(cpu_step), draft__method="none"))
    assert without >= NEVER_SLOWER * simulate(seconds(target, draft__method="ngram", draft__placement="target"))
    assert target.accepted


class QuicklyProfiledTarget(TimedTarget):
    """A target whose steps were ten times as fast while it measured them during warm-up."""

    async def info(self) -> TargetInfo:
        info = await super().info()
        return replace(info, profile=tuple(replace(sample, seconds=sample.seconds / 10) for sample in info.profile))


@pytest.mark.parametrize("step_time", [gpu_step, cpu_step])
def test_a_profile_of_a_faster_machine_does_not_end_drafts_that_pay(step_time: StepTime) -> None:
    """Warm-up measures short texts on an idle machine. A first plain round that is slower was not delayed."""

    async def seconds(target: TimedTarget) -> float:
        model = DrafterModel(0.8, call_seconds=0.001, row_seconds=0.0001)
        cluster = SimulatedCluster([TimedDrafter(target, model)], target)
        async with cluster.coordinator:
            return await cluster.serve(equal_requests(2, 1000))

    assert simulate(seconds(QuicklyProfiledTarget(step_time))) < 1.1 * simulate(seconds(TimedTarget(step_time)))


class SlowingTarget(TimedTarget):
    """A target whose steps take `slowdown` times as long."""

    slowdown = 1.0

    async def step(self, batch: StepBatch) -> StepResult:
        tokens = sum(row.width for row in batch.rows)
        await asyncio.sleep((self.slowdown - 1) * self.step_time(len(batch.rows), tokens))
        return await super().step(batch)


def test_a_crowd_that_begins_when_steps_have_become_slow_has_drafts() -> None:
    """The crowd's first round without drafts is slow because texts are long: nothing else delayed it."""

    async def seconds(slowdown: float) -> float:
        target = SlowingTarget(gpu_step)
        drafter = TimedDrafter(target, DrafterModel(0.8, call_seconds=0.001, row_seconds=0.0001))
        cluster = SimulatedCluster([drafter], target)
        async with cluster.coordinator:
            await cluster.serve(equal_requests(1, 100, "alone"))
            target.slowdown = slowdown
            return await cluster.serve(equal_requests(4, 400))

    assert simulate(seconds(6.0)) < 1.5 * 6 * simulate(seconds(1.0))


ACCEPTANCES = (0.45, 0.45, 0.2, 0.2, 0.2, 0.2, 0.35, 0.35, 0.65, 0.65, 0.25, 0.25)
"""Acceptance of one answer after another: kinds of text for which the same drafter pays and does not pay."""


@pytest.mark.parametrize("depth_seconds", [0.0, 0.0003, 0.0006])
def test_drafts_on_the_target_are_used_for_the_answers_for_which_they_pay(depth_seconds: float) -> None:
    async def each_answer(settings: dict[str, object]) -> list[float]:
        model = DrafterModel(0.0, call_seconds=0.001, depth_seconds=depth_seconds)
        target = DraftingTarget(cpu_step, model)
        cluster = SimulatedCluster([], target, draft__max_nodes=7, draft__max_depth=7, **settings)
        seconds = []
        async with cluster.coordinator:
            for index, acceptance in enumerate(ACCEPTANCES):
                target.drafter.model = replace(model, acceptance=acceptance)
                seconds.append(await cluster.serve(equal_requests(1, 128, f"{index}-")))
        return seconds

    on_target: dict[str, object] = {"draft__method": "ngram", "draft__placement": "target"}
    without = simulate(each_answer({"draft__method": "none"}))
    always = simulate(each_answer(on_target | {"draft__controller": "off"}))
    chosen = simulate(each_answer(on_target))
    assert sum(chosen) <= sum(map(min, without, always)) / NEVER_SLOWER
    best = ACCEPTANCES.index(max(ACCEPTANCES))
    assert chosen[best] < 0.8 * without[best]
