"""A drafter works between calls. This work never delays a waiting call, and its failure affects no call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from tests.support.fakes.echo_workers import EchoDrafter, Gate, draft_row, propose, release, row_without_budget, until
from tests.unit.serve.conftest import HeldRunAhead
from workers.serve.draft_servicer import DraftServicer


async def test_idle_work_runs_between_calls_until_there_is_none_left() -> None:
    method = EchoDrafter(passes_left=3)
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("a", 1))
    await until(lambda: method.passes_left == 0)
    await servicer.close()
    assert method.calls == [("propose", "a"), *[("run_ahead",)] * 3]
    assert len(method.threads) == 1


async def test_a_call_without_budget_is_answered_once_its_tokens_are_computed() -> None:
    method = EchoDrafter()
    method.pieces_left = 3
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("b", 1))  # a call with a budget does not wait for the pieces
    assert method.pieces_left == 3
    await propose(servicer, row_without_budget("a", 1))
    assert method.calls == [("propose", "b"), ("propose", "a"), *[("catch_up", "a")] * 3]
    assert len(method.threads) == 1
    await servicer.close()


async def test_a_call_with_budget_runs_between_the_pieces_of_a_call_without(gate: Gate) -> None:
    method = EchoDrafter()
    method.pieces_left = 3
    catch_up = method.catch_up

    def held_catch_up(sequence_ids: Sequence[SequenceId]) -> bool:
        gate.pass_through()
        return catch_up(sequence_ids)

    method.catch_up = held_catch_up  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    telling = asyncio.create_task(propose(servicer, row_without_budget("a", 1)))
    await gate.reached()
    asking = asyncio.create_task(propose(servicer, draft_row("b", 1)))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(telling, asking)
    assert method.calls == [("propose", "a"), ("catch_up", "a"), ("propose", "b"), *[("catch_up", "a")] * 2]
    await servicer.close()


async def test_tokens_that_cannot_be_computed_are_left_to_the_next_proposal(caplog: pytest.LogCaptureFixture) -> None:
    method = EchoDrafter()

    def failing(_: Sequence[SequenceId]) -> bool:
        raise RuntimeError("poisoned token")

    method.catch_up = failing  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    assert (await propose(servicer, row_without_budget("a", 1)))[0].fault is None
    assert "committed tokens could not be computed" in caplog.text
    await servicer.close()


async def test_a_waiting_call_runs_before_the_next_idle_work(gate: Gate) -> None:
    method = HeldRunAhead(gate, passes_left=5)
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("a", 1))
    await gate.reached()
    waiting = asyncio.create_task(propose(servicer, draft_row("b", 1)))
    freeing = asyncio.create_task(release(servicer, "a"))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(waiting, freeing)
    await until(lambda: method.passes_left == 0)
    await servicer.close()
    begun = [("propose", "a"), ("run_ahead",), ("propose", "b"), ("release", "a")]
    assert method.calls == [*begun, *[("run_ahead",)] * 4]


async def test_idle_work_that_fails_is_logged_and_stops_until_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    method = EchoDrafter()
    tried = 0

    def broken() -> bool:
        nonlocal tried
        tried += 1
        raise RuntimeError("pool is full")

    method.run_ahead = broken  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    for call in (1, 2):
        assert (await propose(servicer, draft_row("a", 1)))[0].tree == TokenTree.chain([1])
        await until(lambda expected=call: tried == expected)
        await asyncio.sleep(0.01)
    assert tried == 2
    assert servicer.failures == 0
    await servicer.close()
    assert "pool is full" in caplog.text
