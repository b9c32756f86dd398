"""When the target fails, streams pause: no token changes, no block leaks, no stream ends silently."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.quarantine import MAX_LOSSES
from cluster.coordinator.requests.live_sequence import QUARANTINE_LOSSES
from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    TargetUnavailable,
)
from cluster.core.kv import KvOccupancy
from cluster.core.verification import StepBatch, StepResult, Verdict
from tests.support.fakes.fake_cluster import (
    all_tokens,
    configure,
    read,
    request,
    requests,
    serving,
    tokens_of,
    until,
    value_of,
)
from tests.support.fakes.fake_drafters import PerfectDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget


async def test_streams_pause_while_the_target_is_lost_and_replays_are_counted() -> None:
    target = FakeTarget(step_delay=0.001)
    metrics = Metrics()
    wanted = request(max_tokens=30)
    async with Coordinator(target, [WrongDrafter(target)], configure(), metrics) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        target.crash()
        await asyncio.sleep(0.02)
        assert not reading.done()
        assert coordinator.ready  # a short absence refuses no request
        target.revive()
        assert await reading == target.answer(wanted)
    assert value_of(metrics, "pilotfish:target_replays_total") == 1


async def test_a_target_that_stays_away_makes_the_coordinator_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.GRACE_SECONDS", 0.0)
    target = FakeTarget()
    async with serving(target, WrongDrafter(target)) as coordinator:
        target.crash()
        reading = asyncio.create_task(tokens_of(coordinator, request()))
        await until(lambda: not coordinator.ready)
        with pytest.raises(NotReady):
            await read(coordinator, request("another"))
        target.revive()
        assert await reading == target.answer(request())
        assert coordinator.ready


async def test_a_deadline_passes_while_the_target_hangs() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, WrongDrafter(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=400, deadline=time.monotonic() + 0.25)))
        await until(lambda: len(target.batches) > 2)
        target.hang()
        with pytest.raises(DeadlineExceeded):
            await reading
        target.unhang()
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))
        await until(lambda: target.blocks_free == target.blocks)


async def test_a_step_that_hangs_counts_as_a_lost_target() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = request(max_tokens=30)
    async with serving(target, WrongDrafter(target), target__step_timeout_seconds=0.03) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, wanted))
        await until(lambda: len(target.batches) > 2)
        plain, hung = target.step, asyncio.Event()

        async def hang_once(batch: StepBatch) -> StepResult:
            target.step = plain  # type: ignore[method-assign]
            hung.set()
            await asyncio.Event().wait()
            return await plain(batch)

        target.step = hang_once  # type: ignore[method-assign]
        assert await reading == target.answer(wanted)
        assert hung.is_set()


async def test_a_step_that_the_target_refuses_is_tried_again() -> None:
    target = FakeTarget()
    plain = target.step

    async def overloaded_once(batch: StepBatch) -> StepResult:
        target.step = plain  # type: ignore[method-assign]
        raise Overloaded("too many calls")

    async with serving(target, WrongDrafter(target)) as coordinator:
        target.step = overloaded_once  # type: ignore[method-assign]
        assert await tokens_of(coordinator, request()) == target.answer(request())


async def test_a_request_that_crashes_the_target_every_time_is_given_up() -> None:
    target = FakeTarget(blocks=40)
    poison = request("poison", (9, 9, 9), max_tokens=4)
    original = target.step

    async def step(batch: StepBatch) -> StepResult:
        if any(row.pending[: len(poison.prompt)] == poison.prompt for row in batch.rows):
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        harmless = requests(4, max_tokens=6)
        reading = asyncio.create_task(all_tokens(coordinator, harmless))
        with pytest.raises(TargetUnavailable, match="times in a row on this request"):
            await tokens_of(coordinator, poison)
        assert await reading == [target.answer(one) for one in harmless]
    assert target.accepted > 0


async def test_a_request_that_crashes_the_target_behind_its_first_chunk_is_given_up_too() -> None:
    target = FakeTarget()
    poison = request("poison", (*(7,) * 40, *(31,) * 30), max_tokens=4)
    original, begun, crashes = target.step, 0, 0

    async def step(batch: StepBatch) -> StepResult:
        nonlocal begun, crashes
        if any(row.pending[-3:] == (31, 31, 31) for row in batch.rows):
            crashes += 1
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        begun += any(row.start is not None and row.pending[:9] == poison.prompt[:9] for row in batch.rows)
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        harmless = [*requests(4, max_tokens=30), request("long", (*range(1, 26),) * 4, max_tokens=30)]
        reading = asyncio.create_task(all_tokens(coordinator, harmless))
        async with asyncio.timeout(10):
            with pytest.raises(TargetUnavailable, match="times in a row on this request"):
                await tokens_of(coordinator, poison)
        assert await reading == [target.answer(one) for one in harmless]
    assert crashes == MAX_LOSSES
    assert begun >= crashes  # its first chunk was computed before each crash
    assert target.accepted > 0


@pytest.mark.parametrize("placement", ["drafter", "target"])
async def test_drafts_that_crash_the_target_every_time_cost_no_answer(placement: str) -> None:
    target = FakeTarget()
    fragile, harmless = request("fragile", (9, 9, 9), max_tokens=30), requests(3, max_tokens=60)
    original, ids, crashes = target.step, set[str](), 0

    async def step(batch: StepBatch) -> StepResult:
        nonlocal crashes
        ids.update(row.sequence_id for row in batch.rows if row.start is not None and row.pending[:3] == fragile.prompt)
        if any(row.sequence_id in ids and (row.tree or row.next_budget.max_nodes) for row in batch.rows):
            crashes += 1
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    patient = {"draft__placement": placement, "draft__timeout_seconds": 10.0}  # a late draft would be a plain round
    async with serving(target, PerfectDrafter(target), **patient) as coordinator:
        answers = await all_tokens(coordinator, [fragile, *harmless])
    assert answers == [target.answer(one) for one in (fragile, *harmless)]
    assert len(ids) == 1
    assert crashes == QUARANTINE_LOSSES + 1
    assert placement == "drafter" or any(row.next_budget.max_nodes for batch in target.batches for row in batch.rows)
    assert placement == "target" or target.accepted > 0  # the other requests had drafts again


async def test_a_quarantined_request_whose_grammar_is_being_compiled_keeps_no_other_waiting() -> None:
    target = FakeTarget()
    slow, others = request("slow", (9, 9, 9), max_tokens=4), requests(3, max_tokens=20)
    original, crashes, refusals, is_compiled = target.step, 0, 0, False

    async def step(batch: StepBatch) -> StepResult:
        nonlocal crashes, refusals
        if not any(row.start is not None and row.pending[:3] == slow.prompt for row in batch.rows):
            return await original(batch)
        if crashes < QUARANTINE_LOSSES:
            crashes += 1
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        (row,) = batch.rows
        if is_compiled:
            return await original(batch)
        refusals += 1
        fault = RowFault(RowFaultCode.NOT_READY, "its grammar is being compiled")
        return StepResult(
            (Verdict(row.sequence_id, row.base_len, fault=fault),), KvOccupancy(target.blocks, target.blocks_free)
        )

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, slow))
        assert await all_tokens(coordinator, others) == [target.answer(one) for one in others]
        assert refusals > 0
        is_compiled = True
        assert await reading == target.answer(slow)
    assert crashes == QUARANTINE_LOSSES
    assert target.accepted > 0


@pytest.mark.parametrize("crashes", [0, QUARANTINE_LOSSES])
async def test_new_prompts_do_not_wait_for_the_grammar_of_a_prompt_that_fills_the_steps(crashes: int) -> None:
    """The last chunk of the prompt that waits for its grammar would take all tokens of each step."""
    target = FakeTarget()
    slow = request("slow", (*(7,) * 63, 31), max_tokens=4)
    new = [request(f"new{index}", range(1, 25), max_tokens=4, seed=index) for index in range(3)]
    original, left, refusals, is_compiled = target.step, crashes, 0, False

    async def step(batch: StepBatch) -> StepResult:
        nonlocal left, refusals
        last = [row for row in batch.rows if row.decide and row.pending[-1] == 31 and row.base_len == 64]
        if last and left:
            left -= 1
            target.crash()
            target.revive()
            raise TargetUnavailable("it crashed")
        if not last or is_compiled:
            return await original(batch)
        refusals += 1
        fault = RowFault(RowFaultCode.NOT_READY, "its grammar is being compiled")
        result = await original(StepBatch(tuple(row for row in batch.rows if row not in last)))
        return replace(
            result, verdicts=(*result.verdicts, *(Verdict(row.sequence_id, 64, fault=fault) for row in last))
        )

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, slow))
        await until(lambda: refusals > 0)
        assert await all_tokens(coordinator, new) == [target.answer(one) for one in new]
        assert not reading.done()
        is_compiled = True
        assert await reading == target.answer(slow)
    assert left == 0
    assert target.accepted > 0


async def test_requests_that_come_and_go_do_not_shorten_the_pauses_after_lost_calls() -> None:
    """A process whose device fails each call is replaced after some tenths of a second. Requests outlast that."""
    target = FakeTarget()
    original, wanted, lost = target.step, request(max_tokens=30), 0
    began = time.monotonic()

    async def step(batch: StepBatch) -> StepResult:
        nonlocal lost
        if lost < MAX_LOSSES - 1:
            lost += 1
            raise RuntimeError("the device fails")
        return await original(batch)

    async with serving(target, PerfectDrafter(target)) as coordinator:
        target.step = step  # type: ignore[method-assign]
        reading = asyncio.create_task(tokens_of(coordinator, wanted))
        others = 0
        while not reading.done():
            others += 1
            other = asyncio.create_task(tokens_of(coordinator, request(f"other-{others}")))
            await asyncio.sleep(0.001)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        assert await reading == target.answer(wanted)
        taken = time.monotonic() - began
    assert lost == MAX_LOSSES - 1
    assert taken > 0.3  # the pauses after so many losses, whoever comes
    assert others > MAX_LOSSES
    assert target.accepted > 0


async def test_a_target_that_is_lost_while_no_request_runs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.GRACE_SECONDS", 0.05)
    target = FakeTarget()
    async with serving(target, PerfectDrafter(target)) as coordinator:
        assert coordinator.ready
        target.crash()
        await until(lambda: not coordinator.ready)
        target.revive()
        await until(lambda: coordinator.ready)


async def test_an_unexpected_error_of_the_target_counts_as_a_lost_target() -> None:
    target = FakeTarget()
    original, failures = target.step, [RuntimeError("unexpected")]

    async def step(batch: StepBatch) -> StepResult:
        if failures:
            raise failures.pop()
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        wanted = request("well", max_tokens=5)
        assert await tokens_of(coordinator, wanted) == target.answer(wanted)
    assert target.accepted > 0
