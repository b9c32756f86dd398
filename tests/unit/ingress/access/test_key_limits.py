"""Limits of clients: requests and tokens a minute, and answers at a time."""

from __future__ import annotations

import pytest

from cluster.core.config.server import ClientLimitsSection
from cluster.core.errors import RateLimited
from cluster.ingress.access.key_limits import ClientUse, ClientUses


def use(**limits: int) -> ClientUse:
    return ClientUse.begin(ClientLimitsSection(**limits), 0.0)


def test_a_client_without_limits_is_never_refused() -> None:
    free = use()
    for _ in range(1000):
        free.enter("alice", 16, 0.0)
        free.count(10_000, 0.0)
    assert free.answers == 16_000


def test_requests_refill_evenly_and_the_wait_is_told() -> None:
    limited = use(requests_per_minute=3)
    for _ in range(3):
        limited.enter("alice", 1, 0.0)
    with pytest.raises(RateLimited, match="alice has used its requests") as refusal:
        limited.enter("alice", 1, 0.0)
    assert refusal.value.retry_after_seconds == pytest.approx(20.0)
    limited.enter("alice", 1, 20.0)
    with pytest.raises(RateLimited):
        limited.enter("alice", 1, 39.0)
    for _ in range(3):
        limited.enter("alice", 1, 1000.0)
    with pytest.raises(RateLimited):
        limited.enter("alice", 1, 1000.0)


def test_tokens_beyond_the_share_are_waited_for() -> None:
    limited = use(tokens_per_minute=60)
    limited.enter("alice", 1, 0.0)
    limited.count(100, 0.0)
    with pytest.raises(RateLimited, match="tokens") as refusal:
        limited.enter("alice", 1, 0.0)
    assert refusal.value.retry_after_seconds == pytest.approx(41.0)
    limited.enter("alice", 1, 41.0)


def test_answers_at_a_time_are_counted_until_they_end() -> None:
    limited = use(concurrent_answers=4)
    limited.enter("alice", 3, 0.0)
    with pytest.raises(RateLimited, match="may have 4 answers at a time, and has 3"):
        limited.enter("alice", 2, 0.0)
    limited.enter("alice", 1, 0.0)
    limited.leave(3)
    limited.enter("alice", 3, 0.0)


def test_a_refused_request_uses_nothing() -> None:
    limited = use(requests_per_minute=1, concurrent_answers=1)
    with pytest.raises(RateLimited):
        limited.enter("alice", 2, 0.0)
    limited.enter("alice", 1, 0.0)
    assert limited.answers == 1


def test_other_limits_count_on_what_was_used() -> None:
    limited = use(requests_per_minute=3, tokens_per_minute=60)
    limited.enter("alice", 2, 0.0)
    limited.count(100, 0.0)
    limited.limit(ClientLimitsSection(requests_per_minute=2, tokens_per_minute=120), 0.0)
    limited.enter("alice", 1, 0.0)  # 100 of 120 tokens, 1 of 2 requests were used
    with pytest.raises(RateLimited, match="requests"):
        limited.enter("alice", 1, 0.0)
    limited.limit(ClientLimitsSection(tokens_per_minute=90), 0.0)
    with pytest.raises(RateLimited, match="tokens"):
        limited.enter("alice", 1, 0.0)
    assert limited.answers == 3


def test_a_table_of_clients_keeps_only_those_that_have_used_something() -> None:
    uses, limits = ClientUses(), ClientLimitsSection(requests_per_minute=60)
    for number in range(1000):
        now = 2.0 * number  # a request is one second's share
        used = uses.of(f"key-{number}", limits, now)
        used.enter("key", 1, now)
        if number:
            used.leave(1)
    assert len(uses) == 2  # the first one, whose answer is generated, and the last one
    assert uses.of("key-0", limits, 5000.0).answers == 1


def test_a_client_whose_limits_change_while_it_is_answered_has_one_use() -> None:
    uses, now = ClientUses(), 0.0
    held = uses.of("alice", ClientLimitsSection(concurrent_answers=2), now)
    held.enter("alice", 2, now)
    uses.of("alice", ClientLimitsSection(concurrent_answers=4), now).enter("alice", 2, now)
    held.leave(2)
    assert uses.of("alice", ClientLimitsSection(concurrent_answers=4), now).answers == 2
