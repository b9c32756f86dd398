"""Requests without a coordinator pause, and go on at once when one joins."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from cluster.core.errors import DeadlineExceeded, NotReady
from cluster.ingress.router import attempts
from cluster.ingress.router.attempts import Arrivals, Attempts

LONG = 60.0


@pytest.fixture
def arrivals() -> Arrivals:
    found = Arrivals()
    found.note(frozenset({"a"}))
    return found


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_SECONDS", LONG)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_SECONDS", LONG)


async def begin_to_pause(tried: Attempts, arrivals: Arrivals) -> asyncio.Task[None]:
    pausing = asyncio.create_task(tried.pause(LONG, has_started=True))
    await asyncio.sleep(0)
    assert arrivals.waiting == 1
    return pausing


async def test_a_coordinator_that_joins_ends_the_pause_and_those_that_failed_are_not_asked_again(
    arrivals: Arrivals,
) -> None:
    tried = Attempts(LONG, arrivals)
    tried.fail("a", NotReady("lost"))
    pausing = await begin_to_pause(tried, arrivals)

    arrivals.note(frozenset({"a", "b"}))

    async with asyncio.timeout(1.0):
        await pausing
    assert set(tried.failed) == {"a"}
    assert arrivals.waiting == 0


async def test_a_pause_that_ends_lets_all_be_asked_again(arrivals: Arrivals) -> None:
    tried = Attempts(LONG, arrivals)
    tried.fail("a", NotReady("lost"))

    await tried.pause(0.01, has_started=True)

    assert not tried.failed


async def test_a_coordinator_that_leaves_or_stays_ends_no_pause(arrivals: Arrivals) -> None:
    pausing = await begin_to_pause(Attempts(LONG, arrivals), arrivals)

    arrivals.note(frozenset({"a"}))
    arrivals.note(frozenset())

    await asyncio.sleep(0.01)
    assert not pausing.done()
    pausing.cancel()
    with suppress(asyncio.CancelledError):
        await pausing
    assert arrivals.waiting == 0


async def test_pauses_that_end_early_use_up_no_patience(arrivals: Arrivals) -> None:
    tried = Attempts(1.0, arrivals)
    for name in "bcde":
        pausing = asyncio.create_task(tried.pause(LONG, has_started=False))
        await asyncio.sleep(0)
        arrivals.note(frozenset({name}))
        await pausing


async def test_a_deadline_that_passes_names_no_address_of_the_cluster(arrivals: Arrivals) -> None:
    tried = Attempts(LONG, arrivals)
    tried.fail("a", NotReady("10.0.0.3:9000 refuses connections"))
    with pytest.raises(DeadlineExceeded) as caught:
        await tried.pause(0.0, has_started=True)
    assert "10.0.0.3" not in caught.value.public_message
