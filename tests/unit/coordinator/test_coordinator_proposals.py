"""The loop with a controller, in simulated time: never slower than plain, as fast as the drafter allows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import GenerationRequest
from tests.support.fake_cluster import (
    all_tokens,
    configure,
    first_commit_then_leave,
    read,
    request,
    requests,
    tokens_of,
    until,
    value_of,
)
from tests.support.fake_drafters import AlwaysAgree, Failing, FakeDrafter, FakeTarget, OutOfSync, RandomGuesses
from tests.support.simulated_time import (
    Habit,
    Law,
    TimedDrafter,
    TimedTarget,
    cpu_step,
    gpu_step,
    measure,
    now,
    simulate,
)

NEVER_SLOWER = 0.97
BAD = {
    "has nothing to say": Habit(0.0, silence=1.0),
    "is always wrong": Habit(0.0),
    "is seldom right and seldom speaks": Habit(0.5, silence=0.8),
    "is slow": Habit(0.4, depth_seconds=0.003, tells=True),
    "thinks too well of itself": Habit(0.1, row_seconds=0.0002, depth_seconds=0.001),
}
GOOD = {
    "is quick": Habit(0.7, call_seconds=0.0003, row_seconds=0.00001, tells=True),
    "is quick and does not tell": Habit(0.8, call_seconds=0.0003, row_seconds=0.00001),
    "takes its time": Habit(0.8, depth_seconds=0.0012, tells=True),
}


@cache
def plain(law: Law, batch: int, tokens: int) -> float:
    return simulate(measure(law, None, batch, tokens))


@pytest.mark.parametrize(("law", "batch"), [(cpu_step, 1), (cpu_step, 8), (gpu_step, 4)])
@pytest.mark.parametrize("character", BAD)
def test_a_bad_drafter_costs_next_to_nothing(character: str, law: Law, batch: int) -> None:
    assert simulate(measure(law, BAD[character], batch, 150)) >= NEVER_SLOWER * plain(law, batch, 150)


def test_a_large_batch_is_as_fast_as_plain_decoding_though_the_drafter_is_good() -> None:
    speed = simulate(measure(cpu_step, GOOD["takes its time"], 32, 50))
    assert speed >= NEVER_SLOWER * plain(cpu_step, 32, 50)


def test_without_a_profile_it_is_learned_just_as_well() -> None:
    speed = simulate(measure(cpu_step, BAD["is always wrong"], 8, 150, profiled=False))
    assert speed >= NEVER_SLOWER * plain(cpu_step, 8, 150)


@pytest.mark.parametrize(("law", "batch"), [(cpu_step, 1), (gpu_step, 4)])
@pytest.mark.parametrize("character", GOOD)
def test_a_good_drafter_is_used_nearly_as_well_as_by_who_knows_the_best_length(
    character: str, law: Law, batch: int
) -> None:
    habit = GOOD[character]
    fixed = [
        simulate(measure(law, habit, batch, 120, draft__controller="off", draft__max_nodes=k, draft__max_depth=k))
        for k in (2, 4, 8)
    ]
    assert simulate(measure(law, habit, batch, 120, before=200)) >= 0.87 * max(fixed)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_very_first_answers_are_guessed_at(batch: int) -> None:
    speed = simulate(measure(gpu_step, GOOD["is quick"], batch, 60))
    assert speed >= 1.4 * plain(gpu_step, batch, 60)


# --- one drafter, seen closely ------------------------------------------------------------------


class Stage:
    """A coordinator in simulated time, and all that it talks to."""

    def __init__(self, drafters: Sequence[FakeDrafter], target: FakeTarget, **settings: object) -> None:
        self.metrics = Metrics()
        self.target = target
        overrides = {"draft__controller": "auto", "scheduler__max_step_tokens": 512, "draft__max_nodes": 8}
        configuration = configure(**(overrides | settings))
        self.coordinator = Coordinator(target, drafters, configuration, self.metrics, now)

    async def tokens(self, wanted: Sequence[GenerationRequest]) -> float:
        """Answer them side by side and check each; returns the seconds that it took."""
        begun = now()
        answers = await all_tokens(self.coordinator, wanted)
        assert answers == [self.target.answer(one) for one in wanted]
        return now() - begun


def many(count: int, tokens: int, name: str = "r") -> list[GenerationRequest]:
    return [request(f"{name}{index}", max_tokens=tokens, seed=index + 1) for index in range(count)]


def test_a_drafter_that_becomes_good_is_found_out_and_one_that_becomes_bad_too() -> None:
    async def work() -> tuple[float, float, float]:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, Habit(0.0))
        stage = Stage([drafter], target)
        async with stage.coordinator:
            bad = await stage.tokens(many(2, 250, "a"))
            drafter.habit = Habit(0.9)
            await stage.tokens(many(2, 250, "b"))
            good = await stage.tokens(many(2, 250, "c"))
            drafter.habit = Habit(0.0)
            await stage.tokens(many(2, 100, "d"))
            worse = await stage.tokens(many(2, 250, "e"))
        return bad, good, worse

    bad, good, worse = simulate(work())
    assert good < 0.5 * bad
    assert worse == pytest.approx(bad, rel=0.03)


def test_guessing_takes_up_again_within_one_answer() -> None:
    async def work() -> int:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, Habit(0.0))
        stage = Stage([drafter], target)
        async with stage.coordinator:
            reading = asyncio.create_task(read(stage.coordinator, request(max_tokens=900)))
            await until(lambda: len(target.batches) > 200)
            drafter.habit = Habit(0.9)
            await reading
        return len(target.batches)

    assert simulate(work()) < 600


def test_the_text_is_the_same_with_a_controller_whatever_the_drafter_is_like() -> None:
    async def work(drafter_type: type[FakeDrafter]) -> None:
        target = FakeTarget(blocks=4000, step_delay=0.01)
        stage = Stage([drafter_type(target)], target)
        async with stage.coordinator:
            await stage.tokens(requests(6, max_tokens=60))
            await until(lambda: target.blocks_free == target.blocks)

    for drafter_type in (AlwaysAgree, RandomGuesses, OutOfSync):
        simulate(work(drafter_type))


def test_a_request_may_turn_guessing_off_or_bound_it() -> None:
    async def work(controller: str) -> None:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, Habit(0.9))
        stage = Stage([drafter], target, draft__controller=controller)
        off = replace(request("off", max_tokens=60, seed=3), max_draft_tokens=0)
        two = replace(request("two", prompt=(9, 9), max_tokens=60, seed=4), max_draft_tokens=2)
        async with stage.coordinator:
            await stage.tokens([off, two])
        trees = [row for batch in target.batches for row in batch.rows]
        assert {0, 2} <= {len(row.tree) for row in trees} <= {0, 1, 2}
        asked = {row.new_tokens[:2] for call in drafter.calls for row in call if row.start is not None}
        assert asked == {(9, 9)}
        assert all(row.budget.max_nodes <= 2 for call in drafter.calls for row in call)

    simulate(work("auto"))
    simulate(work("off"))


def test_who_is_not_asked_is_looked_at_in_the_shadow_of_steps_within_a_share_of_the_time() -> None:
    async def work() -> tuple[float, float]:
        target = TimedTarget(cpu_step)
        drafter = TimedDrafter(target, Habit(0.0))
        stage = Stage([drafter], target)
        async with stage.coordinator:
            seconds = await stage.tokens(many(8, 400))
        return seconds, value_of(stage.metrics, "pilotfish:drafter_call_seconds_total")

    seconds, drafting = simulate(work())
    assert 0 < drafting < 0.02 * seconds


def test_of_those_that_go_without_a_drafter_learns_no_more_than_it_has_time_for() -> None:
    class Reader(TimedDrafter):
        """Takes long to learn a prompt."""

        async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
            """A millisecond for each new token."""
            await asyncio.sleep(0.001 * sum(len(row.new_tokens) for row in rows))
            return await super().propose(rows, timeout_seconds)

    async def work() -> int:
        target = TimedTarget(cpu_step)
        drafter = Reader(target, Habit(0.0))
        stage = Stage([drafter], target, draft__timeout_seconds=5.0)
        async with stage.coordinator:
            await stage.tokens([request(f"r{i}", prompt=[i + 1] * 200, max_tokens=200, seed=i) for i in range(12)])
        return len({row.sequence_id for call in drafter.calls for row in call})

    assert 1 <= simulate(work()) <= 5  # a fifth of a second each; the answers take four seconds


def test_a_drafter_that_was_not_there_is_found_when_it_comes_though_guessing_rests() -> None:
    async def work() -> None:
        target = TimedTarget(gpu_step)
        drafter = Failing(target)
        stage = Stage([drafter], target)
        async with stage.coordinator:
            reading = asyncio.create_task(stage.tokens(many(8, 600)))
            await until(lambda: len(target.batches) > 100)
            assert not drafter.known
            drafter.is_down = False
            await until(lambda: bool(drafter.known))
            await reading
        assert any(len(row.tree) for batch in target.batches for row in batch.rows)

    simulate(work())


# --- what takes long ----------------------------------------------------------------------------


def test_a_long_prompt_is_told_while_the_target_computes_it_and_holds_nobody_up() -> None:
    class Reader(TimedDrafter):
        """Reads slowly."""

        async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
            """Half a millisecond for each new token."""
            await asyncio.sleep(0.0005 * sum(len(row.new_tokens) for row in rows))
            return await super().propose(rows, timeout_seconds)

    async def work(controller: str) -> None:
        target = TimedTarget(gpu_step)
        drafter = Reader(target, Habit(0.9))
        stage = Stage([drafter], target, draft__controller=controller, draft__timeout_seconds=5.0)
        async with stage.coordinator:
            short = asyncio.create_task(read(stage.coordinator, request("short", max_tokens=300, seed=1)))
            await until(lambda: len(target.batches) > 20)
            begun, steps = now(), len(target.batches)
            await stage.tokens([request("long", prompt=[7] * 400, max_tokens=30, seed=2)])
            assert (now() - begun) / (len(target.batches) - steps) < 0.03  # telling alone takes 0.2 s
            await short
        told = [row for call in drafter.calls for row in call if len(row.new_tokens) >= 400]
        assert [row.budget.max_nodes for row in told] == [0]

    simulate(work("auto"))
    simulate(work("off"))


class Reader(TimedDrafter):
    """Takes a millisecond to learn a token."""

    given_up = 0

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """Learn, then guess."""
        try:
            await asyncio.sleep(0.001 * sum(len(row.new_tokens) for row in rows))
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return await super().propose(rows, timeout_seconds)


def test_a_prompt_alone_is_told_if_its_answer_takes_twice_as_long_as_learning_it() -> None:
    async def work() -> None:
        target = TimedTarget(cpu_step)
        drafter = Reader(target, GOOD["is quick"])
        stage = Stage([drafter], target, draft__timeout_seconds=5.0)
        async with stage.coordinator:
            await stage.tokens([request("first", prompt=[1] * 100, max_tokens=200)])
            await stage.tokens([request("short", prompt=[2] * 400, max_tokens=16)])
            await stage.tokens([request("long", prompt=[3] * 400, max_tokens=300)])
        told = [row.new_tokens[0] for call in drafter.calls for row in call if len(row.new_tokens) > 64]
        assert told == [1, 3]  # the first one shows how long learning takes

    simulate(work())


def test_who_leaves_is_not_learned_any_further() -> None:
    async def work() -> None:
        target = TimedTarget(cpu_step)
        drafter = Reader(target, GOOD["is quick"])
        stage = Stage([drafter], target, draft__timeout_seconds=5.0)
        async with stage.coordinator:
            await first_commit_then_leave(stage.coordinator, request("r", prompt=[1] * 2000, max_tokens=1000))
            left = now()
            await until(lambda: drafter.given_up == 1)
            assert now() - left < 0.05  # learning takes two seconds
            await stage.tokens([request("next", max_tokens=20)])  # it is as well as before

    simulate(work())


def test_alone_with_a_drafter_that_pays_one_asks_for_the_largest_trees() -> None:
    async def work() -> list[DraftBudget]:
        target = TimedTarget(cpu_step)
        drafter = TimedDrafter(target, GOOD["takes its time"])
        stage = Stage([drafter], target)
        async with stage.coordinator:
            await stage.tokens(many(1, 400))
        return [row.budget for call in drafter.calls for row in call if row.budget.max_nodes]

    asked = simulate(work())
    assert set(asked[40:80]) == {max(asked, key=lambda budget: budget.max_nodes)}


def test_a_proposal_that_is_much_later_than_usual_is_not_waited_for() -> None:
    async def work() -> float:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, Habit(0.9))
        stage = Stage([drafter], target, draft__timeout_seconds=10.0)
        async with stage.coordinator:
            reading = asyncio.create_task(read(stage.coordinator, request(max_tokens=600)))
            await until(lambda: len(target.batches) > 30)
            drafter.habit = Habit(0.9, call_seconds=2.0)
            begun, steps = now(), len(target.batches)
            await until(lambda: len(target.batches) > steps + 3)
            waited = now() - begun
            drafter.habit = Habit(0.9)
            await reading
        assert value_of(stage.metrics, "pilotfish:drafter_fallback_total", reason="late") >= 1
        return waited

    assert simulate(work()) < 0.1


# --- halves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["auto", "off"])
def test_with_halves_that_take_turns_the_target_does_not_wait_for_drafts(controller: str) -> None:
    async def work(alternate: str) -> tuple[float, float]:
        target = TimedTarget(gpu_step)
        drafter = TimedDrafter(target, Habit(0.8, call_seconds=0.009, tells=True))
        stage = Stage([drafter], target, draft__controller=controller, draft__alternate=alternate)
        async with stage.coordinator:
            seconds = await stage.tokens(many(8, 120))
        steps = len(target.batches)
        return seconds, value_of(stage.metrics, "pilotfish:propose_latency_seconds_sum") / steps

    _, together = simulate(work("off"))
    _, in_turn = simulate(work("on"))
    assert in_turn < 0.2 * together


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_halves_write_the_same_text(count: int) -> None:
    async def work() -> None:
        target = FakeTarget(blocks=60, step_delay=0.001)
        stage = Stage([RandomGuesses(target)], target, draft__controller="off", draft__alternate="on")
        async with stage.coordinator:
            await stage.tokens(requests(count, max_tokens=50))
            await until(lambda: target.blocks_free == target.blocks)
        if count > 1:
            assert any(len(batch.rows) < count for batch in target.batches[10:20])

    simulate(work())


# --- several drafters ---------------------------------------------------------------------------


def test_sequences_are_spread_over_drafters_and_stay_where_they_are() -> None:
    async def work() -> None:
        target = FakeTarget(blocks=4000, step_delay=0.005)
        drafters = [AlwaysAgree(target) for _ in range(3)]
        stage = Stage(drafters, target, draft__controller="off")
        async with stage.coordinator:
            await stage.tokens(many(6, 40))
            await until(lambda: not any(drafter.known for drafter in drafters))
        served = [{row.sequence_id for call in drafter.calls for row in call} for drafter in drafters]
        assert [len(names) for names in served] == [2, 2, 2]
        assert len(set[SequenceId]().union(*served)) == 6

    simulate(work())


def test_a_dead_drafters_sequences_move_and_some_come_back_with_it() -> None:
    async def work() -> None:
        target = FakeTarget(blocks=4000, max_context_len=4096, step_delay=0.005)
        drafters = [Failing(target), Failing(target)]
        for drafter in drafters:
            drafter.is_down = False
        stage = Stage(drafters, target, draft__controller="off")
        first, second = drafters
        async with stage.coordinator:
            reading = asyncio.create_task(stage.tokens(many(4, 1000)))
            await until(lambda: len(second.known) == 2)
            first.is_down = True
            await until(lambda: len(second.known) == 4)
            first.is_down = False
            calls = len(first.calls)
            await until(lambda: len(first.calls) > calls + 20)
            assert len({row.sequence_id for row in first.calls[-1]}) == 2
            await reading
            await until(lambda: not first.known and not second.known)

    simulate(work())


@pytest.mark.parametrize("controller", ["auto", "off"])
@pytest.mark.parametrize("alternate", ["on", "off"])
def test_the_text_is_the_same_while_drafters_die_and_come_back(alternate: str, controller: str) -> None:
    async def work() -> None:
        luck = random.Random(11)
        target = TimedTarget(gpu_step)
        drafters = [Failing(target) for _ in range(3)]
        stage = Stage(drafters, target, draft__controller=controller, draft__alternate=alternate)
        async with stage.coordinator:
            reading = asyncio.create_task(stage.tokens(many(7, 300)))
            while not reading.done():
                drafter = luck.choice(drafters)
                drafter.is_down = not drafter.is_down
                await asyncio.sleep(luck.uniform(0, 0.2))
            await reading
            for drafter in drafters:
                drafter.is_down = False
            await until(lambda: not any(drafter.known for drafter in drafters))

    simulate(work())


def test_who_leaves_while_a_call_names_it_is_released_everywhere() -> None:
    async def work() -> None:
        target = FakeTarget(blocks=4000, step_delay=0.005)
        drafters = [TimedDrafter(target, Habit(0.9, call_seconds=0.05)) for _ in range(2)]
        stage = Stage(drafters, target)
        async with stage.coordinator:
            for index in range(4):
                await first_commit_then_leave(stage.coordinator, request(f"r{index}", max_tokens=200))
            await until(lambda: not any(drafter.known for drafter in drafters))
            assert await tokens_of(stage.coordinator, request()) == target.answer(request())

    simulate(work())
