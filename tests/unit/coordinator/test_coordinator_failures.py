"""Whatever dies, streams see a pause at most: never another token, never a leaked block, never a silent end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence as Many

import pytest

from cluster.coordinator.clients.circuit_breaker import CircuitBreaker, backoff
from cluster.coordinator.clients.release_queue import ReleaseQueue
from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core import scheduler
from cluster.core.errors import (
    DeadlineExceeded,
    DrafterUnavailable,
    InvalidRequest,
    NotReady,
    Overloaded,
    TargetUnavailable,
)
from cluster.core.ids import SequenceId
from cluster.core.request import Commit
from cluster.core.sequence import Sequence
from cluster.core.verification import StepBatch, StepResult, Verdict
from tests.support.fake_cluster import (
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
from tests.support.fake_drafters import (
    AlwaysAgree,
    Failing,
    FakeDrafter,
    FakeTarget,
    NeverAgree,
    OutOfSync,
    RandomGuesses,
    Slow,
)

# --- the target ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_streams_are_the_same_when_target_and_drafter_crash_at_random(seed: int) -> None:
    luck = random.Random(seed)
    target = FakeTarget(blocks=40, step_delay=0.0005)
    drafter = Failing(target)
    wanted = requests(8, max_tokens=40)
    async with serving(target, drafter, draft__timeout_seconds=0.05) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, wanted))
        for _ in range(20):
            await asyncio.sleep(luck.uniform(0, 0.02))
            match luck.randrange(4):
                case 0:
                    target.crash()
                    await asyncio.sleep(luck.uniform(0, 0.005))
                    target.revive()
                case 1:
                    target.revive()  # restarted unnoticed, between two steps
                case 2:
                    target.fail_after_computing = 1
                    await asyncio.sleep(luck.uniform(0, 0.005))
                    target.fail_after_computing = 0
                case 3:
                    drafter.is_down = not drafter.is_down
        assert await reading == [target.answer(one) for one in wanted]
        await until(lambda: target.blocks_free == target.blocks)


async def test_a_lost_target_makes_streams_pause_and_counts_replays() -> None:
    target = FakeTarget(step_delay=0.001)
    metrics = Metrics()
    wanted = request(max_tokens=30)
    async with Coordinator(target, [NeverAgree(target)], configure(), metrics) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        target.crash()
        await asyncio.sleep(0.02)
        assert not reading.done()
        assert coordinator.ready  # a short absence turns nobody away
        target.revive()
        assert await reading == target.answer(wanted)
    assert value_of(metrics, "pilotfish:target_replays_total") == 1


async def test_a_target_that_stays_away_makes_the_coordinator_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.GRACE_SECONDS", 0.0)
    target = FakeTarget()
    async with serving(target, NeverAgree(target)) as coordinator:
        target.crash()
        reading = asyncio.create_task(tokens_of(coordinator, request()))
        await until(lambda: not coordinator.ready)
        with pytest.raises(NotReady):
            await read(coordinator, request("another"))
        target.revive()
        assert await reading == target.answer(request())
        assert coordinator.ready


async def test_the_start_waits_for_a_target_that_is_not_there_yet() -> None:
    target = FakeTarget()
    target.crash()
    coordinator = Coordinator(target, [AlwaysAgree(target)], configure(), Metrics())
    starting = asyncio.create_task(coordinator.start())
    await asyncio.sleep(0.01)
    assert not starting.done() and not coordinator.ready
    target.revive()
    await starting
    assert await tokens_of(coordinator, request()) == target.answer(request())
    await coordinator.stop(0.0)


async def test_a_new_coordinator_frees_what_a_dead_one_left_on_the_target() -> None:
    target = FakeTarget(blocks=12)
    orphans = FakeTarget(blocks=12)
    coordinator = Coordinator(target, [AlwaysAgree(target)], configure(), Metrics())
    await coordinator.start()
    reading = coordinator.generate(request("orphan", max_tokens=30))
    await anext(reading)
    orphans.stored = dict(target.stored)  # the coordinator dies here: nobody will ever release these
    assert orphans.blocks_free < orphans.blocks
    await coordinator.stop(0.0)
    async with serving(orphans, AlwaysAgree(orphans)) as successor:
        assert orphans.blocks_free == orphans.blocks
        wanted = request("well", max_tokens=5)
        assert await tokens_of(successor, wanted) == orphans.answer(wanted)


async def test_a_hanging_target_does_not_hold_deadlines_back() -> None:
    target = FakeTarget(step_delay=0.001)
    async with serving(target, NeverAgree(target)) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=400, deadline=time.monotonic() + 0.25)))
        await until(lambda: len(target.batches) > 2)
        target.hang()
        with pytest.raises(DeadlineExceeded):
            await reading
        target.unhang()
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))
        await until(lambda: target.blocks_free == target.blocks)


async def test_a_step_that_hangs_for_too_long_counts_as_a_lost_target() -> None:
    target = FakeTarget(step_delay=0.001)
    wanted = request(max_tokens=30)
    async with serving(target, NeverAgree(target), target__step_timeout_seconds=0.03) as coordinator:
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


async def test_a_target_that_refuses_in_another_way_is_tried_again() -> None:
    target = FakeTarget()
    plain = target.step

    async def overloaded_once(batch: StepBatch) -> StepResult:
        target.step = plain  # type: ignore[method-assign]
        raise Overloaded("too many calls")

    async with serving(target, NeverAgree(target)) as coordinator:
        target.step = overloaded_once  # type: ignore[method-assign]
        assert await tokens_of(coordinator, request()) == target.answer(request())


async def test_a_request_that_takes_the_target_down_every_time_is_given_up() -> None:
    target = FakeTarget(blocks=40)
    poison = request("poison", (9, 9, 9), max_tokens=4)
    original = target.step

    async def step(batch: StepBatch) -> StepResult:
        if any(row.pending[: len(poison.prompt)] == poison.prompt for row in batch.rows):
            target.crash()
            target.revive()
            raise TargetUnavailable("it went down")
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, AlwaysAgree(target)) as coordinator:
        innocent = requests(4, max_tokens=6)
        reading = asyncio.create_task(all_tokens(coordinator, innocent))
        with pytest.raises(NotReady, match="times in a row on this request"):
            await tokens_of(coordinator, poison)
        assert await reading == [target.answer(one) for one in innocent]


async def test_a_target_that_dies_while_nobody_asks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.GRACE_SECONDS", 0.05)
    target = FakeTarget()
    async with serving(target, AlwaysAgree(target)) as coordinator:
        assert coordinator.ready
        target.crash()
        await until(lambda: not coordinator.ready)
        target.revive()
        await until(lambda: coordinator.ready)


async def test_a_target_that_fails_in_an_unforeseen_way_is_a_lost_target() -> None:
    target = FakeTarget()
    original, failures = target.step, [RuntimeError("unforeseen")]

    async def step(batch: StepBatch) -> StepResult:
        if failures:
            raise failures.pop()
        return await original(batch)

    target.step = step  # type: ignore[method-assign]
    async with serving(target, AlwaysAgree(target)) as coordinator:
        wanted = request("well", max_tokens=5)
        assert await tokens_of(coordinator, wanted) == target.answer(wanted)


async def test_an_invalid_row_fails_its_request_alone() -> None:
    target = FakeTarget()
    wanted = requests(3)
    async with serving(target, AlwaysAgree(target)) as coordinator:
        bad = tokens_of(coordinator, request("bad", prompt=(1, 99)))
        *answers, refusal = await asyncio.gather(
            *(tokens_of(coordinator, one) for one in wanted), bad, return_exceptions=True
        )
    assert answers == [target.answer(one) for one in wanted]
    assert isinstance(refusal, InvalidRequest)


async def test_a_row_that_makes_the_target_refuse_the_batch_is_found_out() -> None:
    target = FakeTarget()
    plain = target.step

    async def strict(batch: StepBatch) -> StepResult:
        if any(13 in row.pending[:1] for row in batch.rows):
            raise InvalidRequest("rows", 13, "another number")
        return await plain(batch)

    target.step = strict  # type: ignore[method-assign]
    wanted = [request(f"r{index}", prompt=(1, index + 2), max_tokens=1) for index in range(5)]
    async with serving(target, NeverAgree(target)) as coordinator:
        bad = tokens_of(coordinator, request("bad", prompt=(13, 1), max_tokens=1))
        *answers, refusal = await asyncio.gather(
            *(tokens_of(coordinator, one) for one in wanted), bad, return_exceptions=True
        )
    assert answers == [target.answer(one) for one in wanted]
    assert isinstance(refusal, InvalidRequest)


async def test_a_verdict_that_does_not_answer_its_row_is_not_believed() -> None:
    target = FakeTarget()
    plain, lies = target.step, iter(range(3))

    async def lying(batch: StepBatch) -> StepResult:
        result = await plain(batch)
        row = batch.rows[0]
        match next(lies, None):
            case 0:
                return StepResult((), result.kv)
            case 1:
                return StepResult((Verdict(row.sequence_id, row.base_len, tokens=(1,) * 9),), result.kv)
            case 2:
                return StepResult((Verdict(row.sequence_id, row.base_len - 1, tokens=(1,)),), result.kv)
        return result

    target.step = lying  # type: ignore[method-assign]
    async with serving(target, NeverAgree(target)) as coordinator:
        assert await tokens_of(coordinator, request()) == target.answer(request())
        await until(lambda: target.blocks_free == target.blocks)


# --- memory -------------------------------------------------------------------------------------


async def test_when_blocks_run_out_the_latest_make_room_and_all_answers_are_right() -> None:
    target = FakeTarget(blocks=12)
    metrics = Metrics()
    wanted = [request(f"r{index}", max_tokens=36, seed=index) for index in range(8)]
    async with Coordinator(target, [RandomGuesses(target)], configure(), metrics) as coordinator:
        assert await all_tokens(coordinator, wanted) == [target.answer(one) for one in wanted]
        await until(lambda: target.blocks_free == target.blocks)
    assert value_of(metrics, "vllm:num_preemptions_total") > 0
    assert not target.faults


async def test_blocks_that_vanish_unannounced_cost_time_and_nothing_else() -> None:
    target = FakeTarget(blocks=20, step_delay=0.001)
    wanted = [request(f"r{index}", max_tokens=40, seed=index) for index in range(4)]
    async with serving(target, RandomGuesses(target)) as coordinator:
        reading = asyncio.create_task(all_tokens(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        target.memory.foreign_blocks = target.blocks_free  # between the report and the next step
        await until(lambda: len(target.faults) > 0)
        target.memory.foreign_blocks = 0
        assert await reading == [target.answer(one) for one in wanted]
        await until(lambda: target.blocks_free == target.blocks)


async def test_a_request_waits_for_blocks_that_somebody_else_holds() -> None:
    target = FakeTarget(blocks=12)
    target.memory.foreign_blocks = 12
    async with serving(target, NeverAgree(target)) as coordinator:
        reading = asyncio.create_task(tokens_of(coordinator, request()))
        await asyncio.sleep(0.02)
        assert not reading.done() and target.batches == []
        target.memory.foreign_blocks = 0
        assert await reading == target.answer(request())


# --- the drafter --------------------------------------------------------------------------------


async def test_a_late_drafter_is_waited_for_once_not_in_every_round() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = Slow(target, delay=5.0)
    metrics = Metrics()
    async with Coordinator(target, [drafter], configure(draft__timeout_seconds=0.01), metrics) as coordinator:
        assert await tokens_of(coordinator, request(max_tokens=40)) == target.answer(request(max_tokens=40))
    assert len(drafter.calls) == 1
    assert value_of(metrics, "pilotfish:drafter_fallback_total", reason="late") == 1
    assert value_of(metrics, "pilotfish:drafter_fallback_total", reason="busy") > 30


async def test_a_drafter_that_comes_back_is_used_again() -> None:
    target = FakeTarget(step_delay=0.001)
    drafter = Failing(target)
    wanted = request(max_tokens=400)
    async with serving(target, drafter) as coordinator:
        reading = asyncio.create_task(read(coordinator, wanted))
        await until(lambda: len(target.batches) > 3)
        drafter.is_down = False
        commits = await reading
    assert [token for commit in commits for token in commit.tokens] == target.answer(wanted)
    assert sum(commit.accepted for commit in commits) > 0
    assert not drafter.known


async def test_a_drafter_that_forgot_is_told_everything_again() -> None:
    target = FakeTarget()
    drafter = OutOfSync(target)
    async with serving(target, drafter) as coordinator:
        await tokens_of(coordinator, request(max_tokens=100))
    rows = [row for call in drafter.calls for row in call]
    assert any(row.start is None for row in rows)
    assert sum(row.start is not None for row in rows) > 1
    assert all((row.start is not None) == (row.known_len == 0) for row in rows)


class DeafDrafter(FakeDrafter):
    """Cannot be released from, for a while."""

    refusals = 3

    async def release(self, sequence_ids: Many[SequenceId]) -> None:
        """Refuse first."""
        self.refusals -= 1
        if self.refusals >= 0:
            raise DrafterUnavailable("connection refused")
        await super().release(sequence_ids)


async def test_releases_are_repeated_until_they_come_through() -> None:
    target = FakeTarget()
    drafter = DeafDrafter(target)
    async with serving(target, drafter) as coordinator:
        await tokens_of(coordinator, request())
        await until(lambda: not drafter.known)
    assert drafter.refusals < 0


# --- the loop itself ----------------------------------------------------------------------------


async def test_a_bug_in_the_loop_ends_the_streams_loudly_and_the_loop_starts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.coordinator.loop.RESTART_SECONDS", 0.05)
    target = FakeTarget(step_delay=0.001)
    metrics = Metrics()
    async with Coordinator(target, [NeverAgree(target)], configure(), metrics) as coordinator:
        reading = asyncio.create_task(read(coordinator, request(max_tokens=400)))
        await until(lambda: len(target.batches) > 2)

        plain = scheduler.plan

        def broken(state: scheduler.State) -> scheduler.Plan:
            monkeypatch.setattr(scheduler, "plan", plain)
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(scheduler, "plan", broken)
        with pytest.raises(NotReady):
            await reading
        seen_ready = coordinator.ready
        assert not seen_ready
        await until(lambda: coordinator.ready)
        assert await tokens_of(coordinator, request("next")) == target.answer(request("next"))
        await until(lambda: target.blocks_free == target.blocks)
    assert value_of(metrics, "pilotfish:loop_restarts_total") == 1
    assert "the loop failed because of a bug" in caplog.text


async def test_a_bug_in_one_request_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    wanted = requests(3)
    plain = Sequence.commit

    def broken(self: Sequence, verdict: Verdict) -> Commit | None:
        if self.request.request_id == "unlucky" and len(self) > 10:
            raise ZeroDivisionError("a bug")
        return plain(self, verdict)

    monkeypatch.setattr(Sequence, "commit", broken)
    async with serving(target, NeverAgree(target)) as coordinator:
        unlucky = tokens_of(coordinator, request("unlucky", max_tokens=100))
        *answers, end = await asyncio.gather(
            *(tokens_of(coordinator, one) for one in wanted), unlucky, return_exceptions=True
        )
        assert answers == [target.answer(one) for one in wanted]
        assert isinstance(end, NotReady)
        assert coordinator.ready
        await until(lambda: target.blocks_free == target.blocks)


# --- patience -----------------------------------------------------------------------------------


def test_a_breaker_opens_at_once_and_is_due_ever_later_until_a_call_comes_back() -> None:
    now = 0.0
    breaker = CircuitBreaker(lambda: now, first=1.0, longest=4.0)
    assert breaker.closed and not breaker.due()
    breaker.record_failure()
    due_at: list[float] = []
    for tick in range(40):
        now = tick / 2
        if breaker.due():
            due_at.append(now)
            breaker.record_failure()
    assert due_at == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]
    breaker.record_success()
    assert breaker.closed


def test_backoff_doubles_up_to_its_bound() -> None:
    assert [backoff(attempt, first=1.0, longest=5.0) for attempt in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff(10_000) == 5.0


async def test_releases_go_out_in_batches_and_a_bug_drops_its_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.clients.release_queue.MAX_BATCH", 2)
    sent: list[tuple[str, ...]] = []

    async def release(sequence_ids: Many[SequenceId]) -> None:
        sent.append(tuple(sequence_ids))
        if len(sent) == 1:
            raise TargetUnavailable("connection refused")
        if len(sent) == 2:
            raise ZeroDivisionError("a bug")

    releases = ReleaseQueue(release)
    releases.add(SequenceId(name) for name in "abc")
    await releases.close(5.0)
    assert sent == [("a", "b"), ("a", "b"), ("c",)]
