"""Delivery: readers get their items in order, together, and only after the loop could send its next step."""

from __future__ import annotations

import asyncio

import pytest

from cluster.coordinator.requests import delivery as module
from cluster.coordinator.requests.delivery import Delivery, Inbox
from cluster.core.errors import NotReady
from cluster.core.request import Commit, FinishReason


def commit(token: int) -> Commit:
    return Commit((token,), 0)


async def test_all_readers_get_their_items_in_order_and_at_once() -> None:
    delivery, first, second = Delivery(), Inbox(), Inbox()
    error = NotReady("stopped")
    readers = [asyncio.create_task(inbox.get()) for inbox in (first, second)]
    await asyncio.sleep(0)
    for inbox, item in ((first, commit(1)), (second, commit(2)), (first, error)):
        delivery.give(inbox, item)
    await asyncio.sleep(0)
    assert not any(reader.done() for reader in readers)
    assert await asyncio.gather(*readers) == [commit(1), commit(2)]
    assert await first.get() is error


async def test_a_reader_that_stops_waiting_leaves_the_items_to_the_next() -> None:
    inbox = Inbox()
    leaving = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    inbox.put(commit(1))
    inbox.put(commit(2))
    assert [await inbox.get(), await inbox.get()] == [commit(1), commit(2)]


async def test_items_of_a_later_round_follow_those_of_an_earlier_one() -> None:
    delivery, inbox = Delivery(), Inbox()
    delivery.give(inbox, commit(1))
    assert await inbox.get() == commit(1)
    delivery.give(inbox, commit(2))
    assert await inbox.get() == commit(2)


async def pass_by(iterations: int = 8) -> None:
    """Let the event loop do what is ready, without waiting for a timer."""
    for _ in range(iterations):
        await asyncio.sleep(0)


async def test_only_the_first_item_and_an_end_wake_a_patient_reader_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_SECONDS", 3600.0)
    delivery, inbox = Delivery(), Inbox(is_patient=True)
    end = Commit((3,), 0, finish=FinishReason.STOP)
    delivery.give(inbox, commit(1))
    assert await inbox.get() == commit(1)
    waiting = asyncio.create_task(inbox.get())
    await pass_by()
    delivery.give(inbox, commit(2))
    await pass_by()
    assert not waiting.done()
    delivery.give(inbox, end)
    await pass_by()
    assert waiting.done()
    assert [await waiting, await inbox.get()] == [commit(2), end]


async def test_an_error_wakes_a_patient_reader_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_SECONDS", 3600.0)
    delivery, inbox, error = Delivery(), Inbox(is_patient=True), NotReady("stopped")
    for item in (commit(1), commit(2), error):
        delivery.give(inbox, item)
    await pass_by()
    assert [await inbox.get(), await inbox.get(), await inbox.get()] == [commit(1), commit(2), error]


async def test_patient_readers_are_woken_together_and_others_do_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HELD_SECONDS", 0.02)
    delivery, hurried = Delivery(), Inbox()
    patient = [Inbox(is_patient=True) for _ in range(2)]
    for inbox in patient:
        delivery.give(inbox, commit(0))
        assert await inbox.get() == commit(0)
    readers = [asyncio.create_task(inbox.get()) for inbox in (*patient, hurried)]
    await pass_by()
    for token, inbox in enumerate((*patient, hurried, *patient)):
        delivery.give(inbox, commit(token))
    await pass_by()
    assert [reader.done() for reader in readers] == [False, False, True]
    done, _ = await asyncio.wait(readers[:2], return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
    assert done == set(readers[:2])
    assert await asyncio.gather(*readers) == [commit(0), commit(1), commit(2)]
    assert [await inbox.get() for inbox in patient] == [commit(3), commit(4)]
