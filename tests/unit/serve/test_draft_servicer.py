"""`DraftService` computes calls in one thread, isolates bad rows, and separates clients."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DescribedMethod, DraftBudget, DraftRow, EvidenceNeeds, RowFaultCode
from cluster.core.errors import DrafterUnavailable, InvalidRequest, NotReady
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from pilotfish.v1 import draft_pb2
from tests.support.fakes.echo_workers import POISON, EchoDrafter, Gate, draft_row, drafter_at, propose, release
from workers.draft.ngram import NgramDrafter, NgramSettings
from workers.serve.draft_servicer import DraftServicer
from workers.serve.lease_servicer import Leases


async def test_proposals_arrive_unchanged() -> None:
    rows = [draft_row("a", 1, 2, 3, 1, 2), draft_row("b", 1, 2), DraftRow(SequenceId("c"), 5, (1,), DraftBudget(1, 1))]
    async with drafter_at(DraftServicer(NgramDrafter(NgramSettings(), DraftSection()))) as drafter:
        assert await drafter.propose(rows, 10) == NgramDrafter(NgramSettings(), DraftSection()).propose(rows)
        await drafter.release([SequenceId("a")])
        forgotten = await drafter.propose([DraftRow(SequenceId("a"), 6, (3,), DraftBudget(1, 1))], 10)
        assert forgotten[0].fault is not None and forgotten[0].fault.code is RowFaultCode.OUT_OF_SYNC


async def test_two_rows_of_one_sequence_are_refused_before_anything_is_computed() -> None:
    method = EchoDrafter()
    async with drafter_at(DraftServicer(method)) as drafter:
        with pytest.raises(DrafterUnavailable, match=r"rows\[1\]\.sequence_id: 'a'"):
            await drafter.propose([draft_row("a", 1), draft_row("a", 1)], 10)
        assert method.calls == []


async def test_all_calls_are_computed_in_one_thread_outside_the_event_loop() -> None:
    method = EchoDrafter()
    servicer = DraftServicer(method)
    await asyncio.gather(*(propose(servicer, draft_row(name, 1)) for name in "abcd"), release(servicer, "a"))
    await servicer.close()
    assert len(method.calls) == 5
    assert len(method.threads) == 1
    assert threading.get_ident() not in method.threads


async def test_a_row_that_makes_the_method_raise_is_the_only_fault() -> None:
    servicer = DraftServicer(EchoDrafter())
    proposals = await propose(servicer, draft_row("a", 1), draft_row("b", POISON), draft_row("c", 3))
    await servicer.close()
    assert [proposal.tree.tokens for proposal in proposals] == [(1,), (), (3,)]
    assert [proposal.fault and proposal.fault.code for proposal in proposals] == [None, RowFaultCode.INVALID, None]


async def test_a_row_that_makes_the_method_raise_in_a_call_of_its_own_fails_no_call() -> None:
    """A coordinator takes a failed call as a failed drafter, and no sequence has drafts until it is tried again."""
    servicer = DraftServicer(EchoDrafter())
    for failures, code in ((1, RowFaultCode.OUT_OF_SYNC), (2, RowFaultCode.INVALID)):  # an error may pass
        (proposal,) = await propose(servicer, draft_row("a", POISON))
        assert proposal.fault is not None and proposal.fault.code is code
        assert servicer.failures == failures  # the method itself may be the cause, of which the next calls tell
    await propose(servicer, draft_row("b", 1))
    assert servicer.failures == 0
    await servicer.close()


async def test_an_error_in_every_row_fails_the_call_and_the_next_call_works() -> None:
    async with drafter_at(DraftServicer(EchoDrafter())) as drafter:
        with pytest.raises(DrafterUnavailable):
            await drafter.propose([draft_row("a", POISON), draft_row("b", POISON)], 10)
        assert (await drafter.propose([draft_row("a", 1)], 10))[0].tree == TokenTree.chain([1])


async def test_a_cancelled_call_is_computed_to_its_end_and_can_be_repeated(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    async with drafter_at(servicer) as drafter:
        leaving = asyncio.create_task(drafter.propose([draft_row("a", 1)], 10))
        await gate.reached()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gate.opened.set()
        assert (await drafter.propose([draft_row("a", 1)], 10))[0].tree == TokenTree.chain([1])
    assert method.calls == [("propose", "a"), ("propose", "a")]


async def test_a_cancelled_proposal_that_has_not_begun_is_not_computed(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("begun", 1)))
    await gate.reached()
    queued = asyncio.create_task(propose(servicer, draft_row("queued", 1)))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    gate.opened.set()
    await begun
    await propose(servicer, draft_row("last", 1))
    assert method.calls == [("propose", "begun"), ("propose", "last")]


async def test_it_describes_its_methods_and_how_long_a_client_may_be_silent() -> None:
    needs = EvidenceNeeds(taps=(2, 15), top=8, decisions=True)
    described = [DescribedMethod("eagle", needs), DescribedMethod("ngram", EvidenceNeeds())]
    servicer = DraftServicer(EchoDrafter(), Leases(7.0), described)
    found = await servicer.Describe(draft_pb2.DraftServiceDescribeRequest(), None)  # type: ignore[arg-type]
    assert [(one.name, one.taps, one.top, one.decisions) for one in found.methods] == [
        ("eagle", 2, 8, True),
        ("ngram", 0, 0, False),
    ]
    assert found.lease_seconds == 7.0
    await servicer.close()


async def test_a_cancelled_release_is_completed(held: tuple[DraftServicer, EchoDrafter], gate: Gate) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("a", 1)))
    await gate.reached()
    freeing = asyncio.create_task(release(servicer, "a"))
    await asyncio.sleep(0)
    freeing.cancel()
    await asyncio.gather(freeing, return_exceptions=True)
    gate.opened.set()
    await begun
    await servicer.close()
    assert method.calls == [("propose", "a"), ("release", "a")]


async def test_the_failure_of_a_cancelled_call_is_logged(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, _ = held
    leaving = asyncio.create_task(propose(servicer, draft_row("a", POISON)))
    await gate.reached()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    with caplog.at_level(logging.ERROR):
        gate.opened.set()
        await servicer.close()
    assert "poisoned token" in caplog.text


async def test_closing_finishes_calls_in_flight_and_refuses_new_ones(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("a", 1)))
    await gate.reached()
    closing = asyncio.create_task(servicer.close())
    await asyncio.sleep(0)
    with pytest.raises(NotReady):
        await propose(servicer, draft_row("b", 1))
    gate.opened.set()
    await closing
    await servicer.close()
    assert (await begun)[0].tree == TokenTree.chain([1])
    assert method.calls == [("propose", "a")]


async def test_waiting_calls_of_several_clients_are_computed_together_but_not_two_of_one_client(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("begun", 1)))
    await gate.reached()
    calls = [("x", "a"), ("x", "b"), ("y", "a"), ("z", "c")]
    waiting = [asyncio.create_task(propose(servicer, draft_row(name, 1), client=client)) for client, name in calls]
    await asyncio.sleep(0)
    gate.opened.set()
    answers = await asyncio.gather(*waiting)
    await begun
    assert [[proposal.sequence_id for proposal in answer] for answer in answers] == [["a"], ["b"], ["a"], ["c"]]
    assert method.calls == [("propose", "begun"), ("propose", "a", "a", "c"), ("propose", "b")]


async def test_a_call_that_fails_in_a_shared_batch_fails_no_other_clients_call(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, _ = held
    begun = asyncio.create_task(propose(servicer, draft_row("begun", 1)))
    await gate.reached()
    rows = {"x": draft_row("a", POISON), "y": draft_row("a", 1)}
    waiting = [asyncio.create_task(propose(servicer, row, client=client)) for client, row in rows.items()]
    await asyncio.sleep(0)
    gate.opened.set()
    spoilt, fine = await asyncio.gather(*waiting)
    await begun
    assert spoilt[0].fault is not None
    assert fine[0].tree == TokenTree.chain([1])


async def test_sequences_of_different_clients_are_separate_even_with_equal_names() -> None:
    servicer = DraftServicer(NgramDrafter(NgramSettings(), DraftSection()))
    async with drafter_at(servicer) as one:
        await one.propose([draft_row("a", 1, 2)], 10)
        further = DraftRow(SequenceId("a"), 3, (3,), DraftBudget(1, 1))
        assert (await propose(servicer, further, client="other"))[0].fault is not None
        await release(servicer, "a", client="other")
        assert (await one.propose([further], 10))[0].fault is None
        with pytest.raises(InvalidRequest, match="client: 'o/ther'"):
            await propose(servicer, further, client="o/ther")
        with pytest.raises(InvalidRequest, match="client"):
            await release(servicer, "a", client="x" * 65)
