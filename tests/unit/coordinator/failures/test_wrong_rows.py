"""Rows that the target refuses, and verdicts that do not match their rows."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.coordinator.clients.target import TargetClient
from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import (
    InvalidRequest,
)
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import LearningStatus, StepBatch, StepResult, Verdict, VerifyRow
from tests.support.fakes.fake_cluster import request, requests, serving, tokens_of, until
from tests.support.fakes.fake_drafters import PerfectDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget


async def test_an_invalid_row_fails_its_request_alone() -> None:
    target = FakeTarget()
    wanted = requests(3)
    async with serving(target, PerfectDrafter(target)) as coordinator:
        bad = tokens_of(coordinator, request("bad", prompt=(1, 99)))
        *answers, refusal = await asyncio.gather(
            *(tokens_of(coordinator, one) for one in wanted), bad, return_exceptions=True
        )
    assert answers == [target.answer(one) for one in wanted]
    assert isinstance(refusal, InvalidRequest)
    assert target.accepted > 0


async def test_a_row_that_makes_the_target_refuse_the_batch_fails_alone() -> None:
    target = FakeTarget()
    plain = target.step

    async def strict(batch: StepBatch) -> StepResult:
        if any(13 in row.pending[:1] for row in batch.rows):
            raise InvalidRequest("rows", 13, "another number")
        return await plain(batch)

    target.step = strict  # type: ignore[method-assign]
    wanted = [request(f"r{index}", prompt=(1, index + 2), max_tokens=1) for index in range(5)]
    async with serving(target, WrongDrafter(target)) as coordinator:
        bad = tokens_of(coordinator, request("bad", prompt=(13, 1), max_tokens=1))
        *answers, refusal = await asyncio.gather(
            *(tokens_of(coordinator, one) for one in wanted), bad, return_exceptions=True
        )
    assert answers == [target.answer(one) for one in wanted]
    assert isinstance(refusal, InvalidRequest)


async def test_a_step_in_parts_shows_what_the_draft_has_learned_and_all_of_its_time() -> None:
    target = FakeTarget()
    plain, learned = target.step, LearningStatus(version=3)

    async def strict(batch: StepBatch) -> StepResult:
        if any(row.pending == (13,) for row in batch.rows):
            raise InvalidRequest("rows", 13, "another number")
        return replace(await plain(batch), step_seconds=0.5, draft_seconds=0.25, learning=learned)

    target.step = strict  # type: ignore[method-assign]
    client = TargetClient(target, 5.0, lambda: None)
    rows = tuple(
        VerifyRow(SequenceId(name), 1, (token,), start=SequenceStart(1, SamplingParameters()))
        for name, token in (("good", 1), ("other", 2), ("bad", 13))
    )
    result = await client.step(rows)
    assert [verdict.fault and verdict.fault.code for verdict in result.verdicts] == [None, None, RowFaultCode.INVALID]
    assert (result.step_seconds, result.draft_seconds, result.learning) == (1.0, 0.5, learned)


async def test_a_verdict_that_does_not_match_its_row_is_dropped() -> None:
    target = FakeTarget()
    plain, wrong_answers = target.step, iter(range(3))

    async def wrong(batch: StepBatch) -> StepResult:
        result = await plain(batch)
        row = batch.rows[0]
        match next(wrong_answers, None):
            case 0:
                return StepResult((), result.kv)
            case 1:
                return StepResult((Verdict(row.sequence_id, row.base_len, tokens=(1,) * 9),), result.kv)
            case 2:
                return StepResult((Verdict(row.sequence_id, row.base_len - 1, tokens=(1,)),), result.kv)
        return result

    target.step = wrong  # type: ignore[method-assign]
    async with serving(target, WrongDrafter(target)) as coordinator:
        assert await tokens_of(coordinator, request()) == target.answer(request())
        await until(lambda: target.blocks_free == target.blocks)


async def test_a_row_that_is_not_ready_is_sent_again_and_delays_no_other() -> None:
    target = FakeTarget()
    plain, refused = target.step, 0

    async def not_ready(batch: StepBatch) -> StepResult:
        nonlocal refused
        late = [row for row in batch.rows if row.pending[:1] == (7,)] if refused < 5 else []
        refused += len(late)
        others = tuple(row for row in batch.rows if row not in late)
        result = await plain(replace(batch, rows=others))
        fault = RowFault(RowFaultCode.NOT_READY, "its grammar is being compiled")
        verdicts = (Verdict(row.sequence_id, row.base_len, fault=fault) for row in late)
        return replace(result, verdicts=(*result.verdicts, *verdicts))

    target.step = not_ready  # type: ignore[method-assign]
    wanted = [request("late", prompt=(7, 1)), request("other", prompt=(1, 2))]
    async with serving(target, PerfectDrafter(target)) as coordinator:
        answers = await asyncio.gather(*(tokens_of(coordinator, one) for one in wanted))
    assert answers == [target.answer(one) for one in wanted]
    assert refused >= 5
