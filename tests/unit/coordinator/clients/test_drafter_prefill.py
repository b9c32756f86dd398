"""Drafters prefill long prompts in the background, when it pays, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Many

import pytest

from cluster.coordinator.clients.drafter_pool import MAX_EVIDENCE_BYTES, DrafterPool
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftBudget, DraftRow, Evidence, HiddenStates, Proposal
from cluster.core.errors import DrafterUnavailable
from cluster.core.evidence_store import MAX_BYTES
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.sequence import DraftRequest, Sequence
from cluster.core.verification import StepResult, Verdict
from tests.support.fakes.fake_cluster import configure, first_commit_then_leave, read, request, until
from tests.support.fakes.fake_drafters import FakeDrafter
from tests.support.fakes.fake_target import FakeTarget
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


@pytest.mark.parametrize("drafters", [1, 2])
def test_a_drafter_that_comes_back_is_not_sent_the_prompts_of_all_sequences_at_once(drafters: int) -> None:
    class Returning(PrefillingDrafter):
        is_down = True

        async def propose(self, rows: Many[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
            if self.is_down:
                raise DrafterUnavailable("connection refused")
            return await super().propose(rows, timeout_seconds)

    async def scenario() -> None:
        target = TimedTarget(gpu_step)
        returning = [Returning(target, DrafterModel(0.9), token_seconds=0.001) for _ in range(drafters)]
        cluster = SimulatedCluster(returning, target, draft__controller="off")
        long = [request(f"long{index}", [index] * 2000, 1000, seed=index) for index in range(8)]
        async with cluster.coordinator:
            reading = asyncio.create_task(cluster.serve([request("short", max_tokens=500, seed=9), *long]))
            await until(lambda: len(target.batches) > 60)
            for drafter in returning:
                drafter.is_down = False
            back = now()
            await until(lambda: target.accepted > 0)
            assert now() - back < 2.0  # the prompts take sixteen seconds
            await reading

    simulate(scenario())


def test_a_drafter_is_shown_all_hidden_states_of_a_long_prompt_while_the_target_computes_it() -> None:
    """Together they are twice what is kept of a sequence."""
    drafter, chunk, chunks = FakeDrafter(FakeTarget()), 512, 8
    width = MAX_BYTES // (chunk * chunks)
    sequence = Sequence(SequenceId("s"), request(prompt=[1] * chunk * chunks), 0)

    async def scenario() -> None:
        pool = DrafterPool([drafter], configure().draft, Metrics(), now)
        pool.start(vocabulary_size=32)
        for first in range(0, len(sequence), chunk):
            await pool.prefill([sequence]).wait(1.0)
            hidden = HiddenStates(first, width, bytes(2 * width * chunk))
            verdict = Verdict(sequence.id, first + chunk, evidence=Evidence(first + chunk, hidden=hidden))
            pool.keep_evidence(StepResult((verdict,), KvOccupancy(1, 1)))
        await pool.propose({sequence.id: DraftRequest(sequence, DraftBudget(1, 1))}).wait(1.0)
        await pool.close(1.0)

    simulate(scenario())
    shown = [evidence.hidden for call in drafter.calls for row in call for evidence in row.evidence]
    assert [position for one in shown if one for position in range(one.first, one.end)] == list(range(len(sequence)))
    assert [sum(len(row.new_tokens) for row in call) for call in drafter.calls] == [len(sequence), *[0] * chunks]


@pytest.mark.parametrize("lens", [(100, 100, 100, 100, 300), (100, 100, 100, 100, 250), (300, 300), (600,)])
def test_a_drafter_is_shown_all_hidden_states_of_prompts_that_it_is_sent_together(lens: tuple[int, ...]) -> None:
    """In the first case they are more than one call takes, in the others they are not; the last is a single chunk."""
    drafter, width = FakeDrafter(FakeTarget()), 24576
    sequences = [Sequence(SequenceId(str(index)), request(str(index), [1] * n), 0) for index, n in enumerate(lens)]

    async def scenario() -> None:
        pool = DrafterPool([drafter], configure().draft, Metrics(), now)
        pool.start(vocabulary_size=32)
        for one in sequences:
            evidence = Evidence(len(one), hidden=HiddenStates(0, width, bytes(2 * width * len(one))))
            pool.keep_evidence(StepResult((Verdict(one.id, len(one), evidence=evidence),), KvOccupancy(1, 1)))
        while calls := pool.prefill(sequences):
            await calls.wait(1.0)
        await pool.close(1.0)

    simulate(scenario())
    for call in drafter.calls:
        assert sum(_shown(row) for row in call) * 2 * width <= MAX_EVIDENCE_BYTES
    shown = {row.sequence_id: _shown(row) for call in drafter.calls for row in call}
    assert shown == {one.id: len(one) for one in sequences}


def _shown(row: DraftRow) -> int:
    """Number of positions whose hidden states a row has."""
    return sum(evidence.hidden.end - evidence.hidden.first for evidence in row.evidence if evidence.hidden)
