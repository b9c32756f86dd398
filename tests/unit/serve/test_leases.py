"""What a client stores on a worker belongs to its lease."""

from __future__ import annotations

from cluster.core.ids import SequenceId
from workers.serve.lease_servicer import Leases

A, B = SequenceId("one/a"), SequenceId("two/a")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def store(leases: Leases, client: str, *sequence_ids: SequenceId) -> None:
    with leases.call(client):
        leases.store(client, sequence_ids)


def test_a_client_that_is_silent_for_too_long_loses_what_it_stored() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    store(leases, "one/", A)
    clock.now += 10.0
    assert not leases.has_expired
    assert leases.expire() == ()
    clock.now += 0.1
    assert leases.has_expired
    assert leases.expire() == (A,)
    assert leases.expire() == ()


def test_every_call_renews_the_lease_of_its_client_alone() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    store(leases, "one/", A)
    store(leases, "two/", B)
    clock.now += 6.0
    with leases.call("two/"):
        pass
    clock.now += 6.0
    assert leases.expire() == (A,)
    clock.now += 6.0
    assert leases.expire() == (B,)


def test_a_lease_does_not_end_during_a_call() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    with leases.call("one/"):
        leases.store("one/", [A])
        clock.now += 1000.0
        assert not leases.has_expired
        with leases.call("one/"):
            pass
        assert leases.expire() == ()
    assert leases.expire() == ()
    clock.now += 10.1
    assert leases.expire() == (A,)


def test_released_sequences_are_forgotten() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    store(leases, "one/", A, SequenceId("one/b"))
    leases.forget("one/", [A])
    leases.forget("two/", [B])
    clock.now += 10.1
    assert leases.expire() == (SequenceId("one/b"),)


def test_what_a_cancelled_call_stores_after_its_end_expires_too() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    with leases.call("one/"):
        pass
    clock.now += 10.1
    assert leases.expire() == ()
    leases.store("one/", [A])  # the computation had begun, and nobody waits for it
    assert not leases.has_expired
    clock.now += 10.1
    assert leases.expire() == (A,)
