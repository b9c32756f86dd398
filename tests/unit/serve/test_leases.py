"""What a client holds on a drafter is released when the client has been silent for the lease, and not before."""

from __future__ import annotations

import asyncio

from tests.support.fakes.echo_workers import EchoDrafter, Gate, draft_row, propose, release, until
from workers.serve.draft_servicer import DraftServicer


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_sequences_of_a_silent_client_are_released_once_and_those_of_others_stay() -> None:
    method, clock = EchoDrafter(), Clock()
    servicer = DraftServicer(method, lease_seconds=10.0, clock=clock)
    await propose(servicer, draft_row("a", 1), draft_row("b", 1), client="gone")
    await propose(servicer, draft_row("c", 1), client="slow")
    clock.now = 9.0
    await propose(servicer, draft_row("c", 1), client="slow")
    clock.now = 11.0
    await servicer.release_expired()
    await servicer.release_expired()
    assert method.calls[-1] == ("release", "a", "b")
    assert [kind for kind, *_ in method.calls].count("release") == 1
    await propose(servicer, draft_row("a", 1), client="gone")  # it was not gone after all
    clock.now = 30.0
    await servicer.release_expired()
    assert set(method.calls[-1]) == {"release", "a", "c"}
    await servicer.close()


async def test_released_sequences_do_not_expire() -> None:
    method, clock = EchoDrafter(), Clock()
    servicer = DraftServicer(method, lease_seconds=10.0, clock=clock)
    await propose(servicer, draft_row("a", 1), client="x")
    await release(servicer, "a", client="x")
    calls = list(method.calls)
    clock.now = 11.0
    await servicer.release_expired()
    assert method.calls == calls
    await servicer.close()


async def test_a_client_with_a_call_under_way_is_not_silent(gate: Gate) -> None:
    method, clock = EchoDrafter(gate.pass_through), Clock()
    servicer = DraftServicer(method, lease_seconds=10.0, clock=clock)
    proposing = asyncio.create_task(propose(servicer, draft_row("a", 1), client="x"))
    await gate.reached()
    clock.now = 100.0
    await servicer.release_expired()
    gate.opened.set()
    await proposing
    assert [kind for kind, *_ in method.calls] == ["propose"]
    await servicer.close()


async def test_a_drafter_looks_for_expired_leases_by_itself() -> None:
    method = EchoDrafter()
    servicer = DraftServicer(method, lease_seconds=0.02)
    await propose(servicer, draft_row("a", 1), client="gone")
    await until(lambda: ("release", "a") in method.calls)
    await servicer.close()
