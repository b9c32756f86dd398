"""Drafts of the target itself: verdicts bring them, the next round uses them, and they never slow decoding down."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.coordinator.drafting.on_target import DraftsOnTarget
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import EVIDENCE_ONLY, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest, Sequence
from cluster.speculation.constants import EVIDENCE_ROUNDS, PROBED_SEQUENCES
from cluster.speculation.controller import LargestTrees
from tests.support.fakes.drafting_target import DraftingTarget
from tests.support.fakes.fake_cluster import request
from tests.support.fakes.simulated_time import (
    DrafterModel,
    SimulatedCluster,
    StepTime,
    cpu_step,
    equal_requests,
    gpu_step,
    simulate,
    tokens_per_second,
)

NEVER_SLOWER = 0.97
RIGHT = DrafterModel(0.9, has_probabilities=True)
WRONG = DrafterModel(0.0)


def cluster(target: DraftingTarget, **settings: object) -> SimulatedCluster:
    return SimulatedCluster([], target, **({"draft__placement": "target", "draft__max_depth": 8} | settings))


async def speed(target: DraftingTarget, batch: int, tokens: int, before: int = 0, **settings: object) -> float:
    """Tokens per simulated second. `before` is the length of as many answers that are served first."""
    simulated = cluster(target, **settings)
    async with simulated.coordinator:
        if before:
            await simulated.serve(equal_requests(batch, before, "earlier"))
        return batch * tokens / await simulated.serve(equal_requests(batch, tokens))


class UnprunableDrafts(DraftingTarget):
    """No single nodes of its drafts may be left out."""

    def _proposal(self, row: Any, verdict: Any) -> Any:
        proposal = super()._proposal(row, verdict)
        return None if proposal is None else replace(proposal, is_prunable=False)


@pytest.mark.parametrize("kind", [DraftingTarget, UnprunableDrafts])
def test_every_round_after_the_first_verifies_the_draft_of_the_step_before(kind: type[DraftingTarget]) -> None:
    """The last draft is as deep as the answer before the step allowed, and is cut."""
    target = kind(cpu_step, DrafterModel(1.0))

    async def serve() -> None:
        simulated = cluster(target, draft__controller="off", draft__max_nodes=4)
        async with simulated.coordinator:
            await simulated.serve(equal_requests(1, 20))

    simulate(serve())
    rows = [row for batch in target.batches for row in batch.rows]
    assert [len(row.tree) for row in rows] == [0, 4, 4, 4, 3]
    assert [row.next_budget for row in rows][:3] == [DraftBudget(4, 4)] * 3
    assert target.accepted == target.drafted


def test_a_request_without_drafts_asks_for_none() -> None:
    target = DraftingTarget(cpu_step, RIGHT)

    async def serve() -> None:
        simulated = cluster(target, draft__controller="off")
        async with simulated.coordinator:
            await simulated.serve([replace(request("plain", max_tokens=12), max_draft_tokens=0)])

    simulate(serve())
    assert target.drafted == sum(target.asked) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("step_time", "batch"), [(cpu_step, 1), (cpu_step, 8), (gpu_step, 4)])
@pytest.mark.parametrize(
    "model",
    [WRONG, DrafterModel(0.0, empty=1.0), DrafterModel(0.3, depth_seconds=0.003)],
    ids=["wrong", "empty", "slow"],
)
def test_bad_drafts_cost_next_to_nothing(model: DrafterModel, step_time: StepTime, batch: int) -> None:
    """The first drafts cost a few steps, because a step waits for them."""
    plain = simulate(tokens_per_second(step_time, None, batch, 300))
    assert simulate(speed(DraftingTarget(step_time, model), batch, 300)) >= NEVER_SLOWER * plain


@pytest.mark.parametrize(("step_time", "batch"), [(cpu_step, 1), (cpu_step, 4), (gpu_step, 16)])
def test_good_drafts_pay_as_much_as_those_of_a_drafter_of_equal_speed(step_time: StepTime, batch: int) -> None:
    elsewhere = simulate(tokens_per_second(step_time, RIGHT, batch, 300, before=400))
    assert simulate(speed(DraftingTarget(step_time, RIGHT), batch, 300, before=400)) >= 0.95 * elsewhere


def test_a_first_draft_that_takes_long_does_not_turn_good_drafts_off() -> None:
    """It computes the keys and values of the whole prompt; later drafts of the sequence do not."""

    async def serve(first_seconds: float) -> int:
        target = DraftingTarget(cpu_step, RIGHT)
        target.first_seconds = first_seconds
        simulated = cluster(target)
        async with simulated.coordinator:
            for number in range(4):
                await simulated.serve([request(f"r{number}", [1 + token % 40 for token in range(90)], max_tokens=30)])
        return target.accepted

    assert simulate(serve(0.08)) >= 0.9 * simulate(serve(0.0)) > 0


def test_a_long_prompt_whose_drafts_cannot_make_up_for_reading_it_is_not_shown() -> None:
    async def serve(prompt_seconds: float) -> int:
        target = DraftingTarget(cpu_step, RIGHT)
        target.prompt_seconds = prompt_seconds
        simulated = cluster(target, scheduler__max_step_tokens=64)
        prompt = [1 + token % 40 for token in range(200)]
        async with simulated.coordinator:
            await simulated.serve(equal_requests(2, 400, "decoding"))
            for number in range(12):
                several = [request(f"{number} {place}", prompt, max_tokens=3) for place in range(2)]
                await simulated.serve(several)
        return target.shown

    assert simulate(serve(0.5)) < 0.5 * simulate(serve(0.0))


def test_a_long_prompt_that_takes_long_to_read_does_not_keep_short_ones_from_having_drafts() -> None:
    target = DraftingTarget(cpu_step, RIGHT)
    target.prompt_seconds = 0.1

    async def serve() -> int:
        simulated = cluster(target, scheduler__max_step_tokens=64)
        async with simulated.coordinator:
            await simulated.serve(equal_requests(2, 200, "decoding"))
            await simulated.serve([request("long", [1 + token % 40 for token in range(400)], max_tokens=40)])
            before = target.accepted
            for number in range(3):
                prompt = [1 + token % 40 for token in range(70)]
                await simulated.serve([request(f"{number} {place}", prompt, max_tokens=40) for place in range(2)])
            return target.accepted - before

    assert simulate(serve()) > 3 * 2 * 40 / 2


def test_while_drafts_do_not_pay_a_few_steps_probe_and_find_when_they_do_again() -> None:
    target = DraftingTarget(cpu_step, WRONG)

    async def serve() -> tuple[float, float]:
        simulated = cluster(target)
        async with simulated.coordinator:
            await simulated.serve(equal_requests(2, 300, "wrong"))
            probes = target.asked[-200:]
            target.drafter.model = RIGHT
            await simulated.serve(equal_requests(2, 300, "learning"))
            return sum(map(bool, probes)) / len(probes), 600 / await simulated.serve(equal_requests(2, 300, "right"))

    share, per_second = simulate(serve())
    assert 0 < share < 0.2
    assert per_second > 1.3 * simulate(tokens_per_second(cpu_step, None, 2, 300))


def test_while_drafts_do_not_pay_the_drafter_reads_only_the_sequences_of_the_next_probe() -> None:
    """Each sequence that it reads makes a step longer."""
    target = DraftingTarget(cpu_step, WRONG)

    async def serve() -> None:
        simulated = cluster(target)
        async with simulated.coordinator:
            await simulated.serve(equal_requests(16, 300, "wrong"))

    simulate(serve())
    late = target.batches[len(target.batches) // 2 :]
    read = [{row.sequence_id for row in batch.rows if row.next_budget == EVIDENCE_ONLY} for batch in late]
    probed = [{row.sequence_id for row in batch.rows if row.next_budget.max_nodes} for batch in late]
    assert max(map(len, read)) == PROBED_SEQUENCES
    assert any(probed)
    for place, names in enumerate(probed):
        before = read[max(0, place - EVIDENCE_ROUNDS) : place]
        assert all(names <= others for others in before if len(before) == EVIDENCE_ROUNDS)


@pytest.mark.parametrize("tokens", [EVIDENCE_ROUNDS + 8, 2 * EVIDENCE_ROUNDS])
def test_the_sequences_of_the_next_probe_stay_those_until_they_end(tokens: int) -> None:
    """Answers that are just long enough to be read first are probed as often as longer ones."""

    async def serve(target: DraftingTarget, length: int) -> None:
        simulated = cluster(target)
        async with simulated.coordinator:
            for number in range(1200 // length):
                await simulated.serve(equal_requests(8, length, f"{number} "))

    def probes(length: int) -> int:
        target = DraftingTarget(cpu_step, WRONG)
        simulate(serve(target, length))
        return sum(any(row.next_budget.max_nodes for row in batch.rows) for batch in target.batches)

    assert probes(tokens) > 0.7 * probes(3 * EVIDENCE_ROUNDS)


def test_the_first_probe_after_a_quiet_time_waits_until_the_drafter_has_read_its_sequences() -> None:
    """While nothing runs, no answer is too short to be read."""
    target = DraftingTarget(cpu_step, WRONG)

    async def serve() -> int:
        simulated = cluster(target)
        async with simulated.coordinator:
            await simulated.serve(equal_requests(4, 400, "earlier"))
            begin = len(target.batches)
            for number in range(3):
                await asyncio.sleep(4.0)
                await simulated.serve(equal_requests(4, 300, f"{number} "))
            return begin

    begin, probes = simulate(serve()), 0
    read: dict[SequenceId, int] = {}
    for place, batch in enumerate(target.batches):
        for row in batch.rows:
            before = read.pop(row.sequence_id, 0)
            if row.next_budget == EVIDENCE_ONLY:
                read[row.sequence_id] = before + 1
            elif row.next_budget.max_nodes and place >= begin:
                assert before >= EVIDENCE_ROUNDS
                probes += 1
    assert probes > 3 * 4


def test_a_target_that_is_lost_loses_its_drafts_and_no_token() -> None:
    target = DraftingTarget(cpu_step, RIGHT)
    target.fail_after_computing = 0

    async def serve() -> None:
        simulated = cluster(target, draft__controller="off")
        async with simulated.coordinator:
            await simulated.serve(equal_requests(3, 10))
            target.fail_after_computing = 2
            await simulated.serve(equal_requests(3, 40, "again"))
        assert target.is_empty

    simulate(serve())
    assert target.accepted > 0


def test_drafts_with_tokens_outside_the_vocabulary_are_not_verified() -> None:
    class Reckless(DraftingTarget):
        def _proposal(self, row: Any, verdict: Any) -> Any:
            proposal = super()._proposal(row, verdict)
            if proposal is None or not proposal.tree:
                return proposal
            bad = type(proposal.tree).chain([self.vocabulary_size, 1])
            return type(proposal)(proposal.sequence_id, proposal.base_len, bad)

    target = Reckless(cpu_step, RIGHT)
    simulate(speed(target, 2, 20, draft__controller="off"))
    assert target.drafted == 0


def test_plain_decoding_is_measured_while_drafts_pay() -> None:
    """The first of two rounds without a budget still verifies the drafts of the step before."""
    target = DraftingTarget(cpu_step, RIGHT)
    simulate(speed(target, 1, 2400))
    steps = [(len(batch.rows[0].tree), asked) for batch, asked in zip(target.batches, target.asked, strict=True)]
    plain = [step for step in steps[4:-2] if step == (0, 0)]
    assert 0 < len(plain) < 0.1 * len(steps)


def request_of(name: str) -> tuple[SequenceId, DraftRequest]:
    sequence = Sequence(SequenceId(name), request(name), 0)
    return sequence.id, DraftRequest(sequence, DraftBudget(4, 2))


def test_a_probe_whose_sequences_end_one_after_another_ends() -> None:
    drafts = DraftsOnTarget(LargestTrees(DraftBudget(4, 2)), {}, Metrics())
    drafts.start(32)
    assert drafts.probe(dict([request_of("a"), request_of("b")]))
    idle = []
    for name in ("a", "b"):
        drafts.release([SequenceId(name)])
        idle.append(drafts.is_idle)
    assert idle == [False, True]
    probe = drafts.take_probe()
    assert probe is not None
    assert not probe.proposals
    assert drafts.take_probe() is None
