"""Drafters prefill long prompts in the background, when it pays, in simulated time."""

from __future__ import annotations

import asyncio

from tests.support.fakes.fake_cluster import first_commit_then_leave, read, request, until
from tests.support.fakes.simulated_time import (
    DrafterModel,
    PrefillingDrafter,
    SimulatedCluster,
    TimedTarget,
    cpu_step,
    gpu_step,
    now,
    simulate,
)

QUICK = DrafterModel(0.7, call_seconds=0.0003, row_seconds=0.00001, has_probabilities=True)


def test_sequences_without_drafts_are_prefilled_within_a_share_of_the_time() -> None:
    async def scenario() -> int:
        target = TimedTarget(cpu_step)
        drafter = PrefillingDrafter(target, DrafterModel(0.0), token_seconds=0.001)
        cluster = SimulatedCluster([drafter], target, draft__timeout_seconds=5.0)
        async with cluster.coordinator:
            await cluster.serve([request(f"r{i}", prompt=[i + 1] * 200, max_tokens=200, seed=i) for i in range(12)])
        return len({row.sequence_id for call in drafter.calls for row in call})

    assert 1 <= simulate(scenario()) <= 5  # each prefill takes 0.2 s, the answers 4 s


def test_a_long_prompt_is_prefilled_in_the_background_and_delays_no_other_request() -> None:
    async def scenario(controller: str) -> None:
        target = TimedTarget(gpu_step)
        drafter = PrefillingDrafter(target, DrafterModel(0.9), token_seconds=0.0005)
        cluster = SimulatedCluster([drafter], target, draft__controller=controller, draft__timeout_seconds=5.0)
        async with cluster.coordinator:
            short = asyncio.create_task(read(cluster.coordinator, request("short", max_tokens=300, seed=1)))
            await until(lambda: len(target.batches) > 20)
            begun, steps = now(), len(target.batches)
            await cluster.serve([request("long", prompt=[7] * 400, max_tokens=30, seed=2)])
            assert (now() - begun) / (len(target.batches) - steps) < 0.03  # the prefill takes 0.2 s
            await short
        prefilled = [row for call in drafter.calls for row in call if len(row.new_tokens) >= 400]
        assert [row.budget.max_nodes for row in prefilled] == [0]

    simulate(scenario("auto"))
    simulate(scenario("off"))


def test_a_single_prompt_is_prefilled_if_its_answer_takes_twice_as_long() -> None:
    async def scenario() -> None:
        target = TimedTarget(cpu_step)
        drafter = PrefillingDrafter(target, QUICK, token_seconds=0.001)
        cluster = SimulatedCluster([drafter], target, draft__timeout_seconds=5.0)
        async with cluster.coordinator:
            await cluster.serve([request("first", prompt=[1] * 100, max_tokens=200)])
            await cluster.serve([request("short", prompt=[2] * 400, max_tokens=16)])
            await cluster.serve([request("long", prompt=[3] * 400, max_tokens=300)])
        prefilled = [row.new_tokens[0] for call in drafter.calls for row in call if len(row.new_tokens) > 64]
        assert prefilled == [1, 3]  # the first prefill shows how long prefills take

    simulate(scenario())


def test_the_prefill_of_a_request_that_left_is_cancelled() -> None:
    async def scenario() -> None:
        target = TimedTarget(cpu_step)
        drafter = PrefillingDrafter(target, QUICK, token_seconds=0.001)
        cluster = SimulatedCluster([drafter], target, draft__timeout_seconds=5.0)
        async with cluster.coordinator:
            await first_commit_then_leave(cluster.coordinator, request("r", prompt=[1] * 2000, max_tokens=1000))
            left = now()
            await until(lambda: drafter.cancelled == 1)
            assert now() - left < 0.05  # the prefill takes two seconds
            await cluster.serve([request("next", max_tokens=20)])  # the drafter still works

    simulate(scenario())
