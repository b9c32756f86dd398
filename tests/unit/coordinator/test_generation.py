"""The coordinator over fakes: the tokens of plain decoding with any drafter, and fewer steps with a good one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.requests import delivery
from cluster.core.ids import RequestId
from cluster.core.request import Commit, FinishReason, GenerationRequest
from cluster.core.verification import StepBatch, StepResult
from tests.support.fakes.fake_cluster import (
    all_tokens,
    configure,
    first_commit_then_leave,
    read,
    request,
    requests,
    serving,
    tokens_of,
    value_of,
)
from tests.support.fakes.fake_drafters import (
    BuggyDrafter,
    FailingDrafter,
    FakeDrafter,
    ForgetfulDrafter,
    InvalidDrafter,
    PerfectDrafter,
    RandomDrafter,
    SlowDrafter,
    WrongDrafter,
)
from tests.support.fakes.fake_target import FakeTarget

ACCURATE: dict[str, type[FakeDrafter]] = {
    "is always right": PerfectDrafter,
    "is right at random": RandomDrafter,
    "loses sequences": ForgetfulDrafter,
    "sends invalid proposals": InvalidDrafter,
}
USELESS: dict[str, Callable[[FakeTarget], FakeDrafter]] = {
    "is always wrong": WrongDrafter,
    "is late": lambda target: SlowDrafter(target, 0.02),
    "is unavailable": FailingDrafter,
    "has a bug": BuggyDrafter,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("character", ACCURATE)
async def test_the_tokens_are_those_of_plain_decoding_when_drafts_are_accepted(
    character: str, batch: int, temperature: float
) -> None:
    target = FakeTarget()
    wanted = requests(batch, temperature=temperature)
    async with serving(target, ACCURATE[character](target), draft__timeout_seconds=10.0) as coordinator:
        answers = await all_tokens(coordinator, wanted)
    assert answers == [target.answer(one) for one in wanted]
    assert target.accepted > 0
    assert target.blocks_free == target.blocks
    assert not target.faults


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("character", USELESS)
async def test_the_tokens_are_those_of_plain_decoding_when_no_draft_is_accepted(
    character: str, batch: int, temperature: float
) -> None:
    target = FakeTarget()
    wanted = requests(batch, temperature=temperature)
    timeout_seconds = 0.005 if character == "is late" else 10.0
    async with serving(target, USELESS[character](target), draft__timeout_seconds=timeout_seconds) as coordinator:
        answers = await all_tokens(coordinator, wanted)
    assert answers == [target.answer(one) for one in wanted]
    assert target.accepted == 0
    assert (target.drafted > 0) == (character == "is always wrong")
    assert target.blocks_free == target.blocks
    assert not target.faults


async def test_a_good_drafter_saves_steps_and_the_usage_reports_it() -> None:
    target = FakeTarget()
    async with serving(target, PerfectDrafter(target)) as coordinator:
        commits = await read(coordinator, request(max_tokens=20))
    usage = commits[-1].usage
    assert usage is not None
    assert len(target.batches) == usage.target_steps == 4  # five tokens per step: four drafted, one of the target's own
    assert usage.accepted_tokens == sum(commit.accepted for commit in commits) == 16
    assert usage.completion_tokens == 20
    assert [commit.finish for commit in commits] == [None, None, None, FinishReason.LENGTH]


@pytest.mark.parametrize("overrides", [{"draft__method": "none"}, {"draft__max_nodes": 0}], ids=str)
async def test_without_a_drafting_method_no_drafter_is_called(overrides: dict[str, object]) -> None:
    target = FakeTarget()
    drafter = PerfectDrafter(target)
    async with serving(target, drafter, **overrides) as coordinator:
        assert await tokens_of(coordinator, request()) == target.answer(request())
    assert drafter.calls == []
    assert len(target.batches) == 12


async def test_every_step_and_every_tree_stays_within_its_budget() -> None:
    target = FakeTarget()
    async with serving(target, InvalidDrafter(target)) as coordinator:
        await all_tokens(coordinator, requests(8))
    for batch in target.batches:
        assert sum(row.width for row in batch.rows) <= 32
        assert all(len(row.tree) <= 6 and row.tree.depth() <= 4 for row in batch.rows)


async def test_a_drafter_is_asked_only_for_rows_that_decide_and_sent_only_new_tokens() -> None:
    target = FakeTarget()
    drafter = WrongDrafter(target)
    async with serving(target, drafter) as coordinator:
        await tokens_of(coordinator, request(prompt=range(1, 31), max_tokens=5))  # wider than half a step
    rows = [row for call in drafter.calls for row in call]
    undecided = sum(not row.decide for batch in target.batches for row in batch.rows)
    assert len(target.batches) - undecided == 5
    assert [len(row.new_tokens) for row in rows] == [30, 1, 1, 1]  # the last token needs no draft
    assert [row.start is not None for row in rows] == [True, False, False, False]


async def test_several_requests_share_one_propose_call_and_one_step() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = PerfectDrafter(target)
    async with serving(target, drafter, scheduler__max_step_tokens=128) as coordinator:
        await all_tokens(coordinator, [request(f"r{index}", max_tokens=20) for index in range(8)])
    assert max(len(batch.rows) for batch in target.batches) == 8
    assert max(len(call) for call in drafter.calls) == 8


async def test_the_metrics_count_what_happened_under_the_names_of_vllm() -> None:
    target = FakeTarget()
    metrics = Metrics()
    async with Coordinator(target, [PerfectDrafter(target)], configure(), metrics) as coordinator:
        await all_tokens(coordinator, [request(f"r{index}", max_tokens=20) for index in range(2)])
        await first_commit_then_leave(coordinator, request("leaves", max_tokens=100))
        text = metrics.exposition()[0].decode()
    assert value_of(metrics, "vllm:prompt_tokens_total") == 15
    assert value_of(metrics, "vllm:request_success_total", finished_reason="length") == 2
    assert value_of(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value_of(metrics, "vllm:time_to_first_token_seconds_count") == 3
    assert value_of(metrics, "vllm:e2e_request_latency_seconds_count") == 3
    accepted = value_of(metrics, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == value_of(metrics, "vllm:spec_decode_num_draft_tokens_total") >= 32
    for name in (
        "pilotfish:committed_tokens_per_step_bucket",
        "pilotfish:propose_latency_seconds_count",
        "pilotfish:step_latency_seconds_count",
        "pilotfish:round_overhead_seconds_count",
    ):
        assert f'{name}{{engine="0"' in text, name


async def test_the_next_step_is_sent_before_readers_get_the_tokens_of_the_former() -> None:
    """What readers do with a step's tokens takes time while the target computes, and not before it does."""
    happened: list[str] = []

    class NotedTarget(FakeTarget):
        async def step(self, batch: StepBatch) -> StepResult:
            happened.append("sent")
            return await super().step(batch)

    async def take(wanted: GenerationRequest) -> None:
        async for commit in coordinator.generate(wanted):
            happened.extend(["read"] * len(commit.tokens))

    target = NotedTarget(step_delay=0.001)
    async with serving(target, PerfectDrafter(target), draft__method="none") as coordinator:
        await asyncio.gather(*(take(request(f"r{index}", max_tokens=6)) for index in range(3)))
    begun = happened.index("read")
    assert happened[:begun] == ["sent"] * 2  # a step is under way when the first token arrives
    rounds = "".join(one[0] for one in happened[begun:]).split("s")
    assert rounds == ["rrr"] * 4 + ["rrrrrr"]  # each step's tokens are read during the next one; the last has none


@pytest.mark.parametrize("has_stop_string", [False, True], ids=["without a stop string", "with a stop string"])
async def test_commits_for_a_caller_that_reads_whole_answers_wait_for_the_last_one(
    has_stop_string: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with stop strings is read at once: its reader finds them, and later steps would be in vain."""
    monkeypatch.setattr(delivery, "HELD_SECONDS", 3600.0)

    async def commits_and_steps(wanted: GenerationRequest) -> list[tuple[Commit, int]]:
        return [(commit, len(target.batches)) async for commit in coordinator.generate(wanted)]

    plain = request(max_tokens=12)
    stopping = replace(plain.stopping, stop_strings=("never",) if has_stop_string else ())
    whole = replace(plain, request_id=RequestId("whole"), streams=False, stopping=stopping)
    target = FakeTarget()
    async with serving(target, PerfectDrafter(target), draft__method="none") as coordinator:
        streamed = await commits_and_steps(plain)
        assert len(target.batches) == 12
        held = await commits_and_steps(whole)
    assert [commit.tokens for commit, _ in held] == [commit.tokens for commit, _ in streamed]
    assert [commit.finish for commit, _ in held] == [commit.finish for commit, _ in streamed]
    at_second = held[1][1] - 12
    assert (at_second < 12) if has_stop_string else (at_second == 12)
    assert streamed[1][1] < 12
    assert held[0][1] - 12 < 12  # the first tokens never wait
