"""The supervisor of a target's ranks: it starts all of them anew when one ends."""

from __future__ import annotations

import asyncio

import pytest

from cluster.core.errors import ConfigurationError, TargetUnavailable
from workers.serve import rank_supervisor
from workers.serve.rank_supervisor import MOST_FAILED_STARTS, RankSupervisor


class FakeRanks:
    """Ranks that serve at `address` once `allowed`, or whose start raises `error`."""

    def __init__(self, address: str, error: Exception | None = None) -> None:
        self.address = address
        self.error = error
        self.started, self.allowed = asyncio.Event(), asyncio.Event()
        self.allowed.set()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []

    async def start(self) -> str:
        self.calls.append("start")
        self.started.set()
        await self.allowed.wait()
        if self.error is not None:
            raise self.error
        return self.address

    async def ended(self) -> str:
        return await self.end

    async def stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")


def launching(*ranks: FakeRanks) -> RankSupervisor:
    """A supervisor that launches these ranks, one after another."""
    waiting = iter(ranks)
    return RankSupervisor(lambda: next(waiting))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_supervisor, "_FIRST_PAUSE_SECONDS", 0.0)


async def test_when_a_rank_ends_all_are_killed_and_others_serve_at_another_address() -> None:
    first, second = FakeRanks("one"), FakeRanks("two")
    supervisor = launching(first, second)
    await supervisor.start()
    assert await supervisor.address() == "one"

    first.end.set_result("rank 1 of 2 ended")
    await second.started.wait()

    assert await supervisor.address() == "two"
    assert first.calls == ["start", "kill"]
    supervisor.check_health()
    await supervisor.stop()
    assert second.calls == ["start", "stop"]


async def test_the_error_of_the_first_start_is_raised_and_what_was_started_is_killed() -> None:
    ranks = FakeRanks("one", ConfigurationError("no such device"))
    with pytest.raises(ConfigurationError, match="no such device"):
        await launching(ranks).start()
    assert ranks.calls == ["start", "kill"]


async def test_a_failed_restart_is_repeated_and_too_many_make_the_replica_unhealthy() -> None:
    failing = [FakeRanks("", ConfigurationError(f"start {number} fails")) for number in range(MOST_FAILED_STARTS)]
    first, last = FakeRanks("one"), FakeRanks("two")
    last.allowed.clear()
    supervisor = launching(first, *failing, last)
    await supervisor.start()
    supervisor.check_health()

    first.end.set_result("rank 0 of 2 ended")
    await last.started.wait()
    with pytest.raises(TargetUnavailable, match=f"start {MOST_FAILED_STARTS - 1} fails"):
        supervisor.check_health()

    last.allowed.set()
    assert await supervisor.address() == "two"
    supervisor.check_health()
    await supervisor.stop()


async def test_an_address_is_awaited_while_the_ranks_start() -> None:
    supervisor = launching(FakeRanks("one"))
    asking = asyncio.create_task(supervisor.address())
    await asyncio.sleep(0)
    assert not asking.done()
    await supervisor.start()
    assert await asking == "one"
    await supervisor.stop()
    await supervisor.stop()
