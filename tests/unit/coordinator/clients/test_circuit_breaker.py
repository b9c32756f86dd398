"""Back-off and circuit breaker, delay by delay."""

from __future__ import annotations

from cluster.coordinator.clients.circuit_breaker import CircuitBreaker, backoff


def test_an_open_circuit_breaker_is_due_after_doubling_delays_until_a_call_succeeds() -> None:
    now = 0.0
    breaker = CircuitBreaker(lambda: now, first=1.0, longest=4.0)
    assert breaker.closed and not breaker.due()
    breaker.record_failure()
    due_at: list[float] = []
    for tick in range(40):
        now = tick / 2
        if breaker.due():
            due_at.append(now)
            breaker.record_failure()
    assert due_at == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]
    breaker.record_success()
    assert breaker.closed


def test_backoff_doubles_up_to_its_bound() -> None:
    assert [backoff(attempt, first=1.0, longest=5.0) for attempt in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff(10_000) == 5.0
