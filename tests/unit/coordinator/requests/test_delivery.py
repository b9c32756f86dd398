"""Delivery: readers get their items in order, together, and only after the loop could send its next step."""

from __future__ import annotations

import asyncio

from cluster.coordinator.requests.delivery import Delivery, Inbox
from cluster.core.errors import NotReady
from cluster.core.request import Commit


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
