"""What the target showed: hidden states by position, and the bounded store between two calls of a drafter."""

from __future__ import annotations

import pytest

from cluster.core.drafting import Evidence, HiddenStates
from cluster.core.evidence_store import MAX_BYTES, MAX_STEPS, EvidenceStore
from cluster.core.ids import SequenceId

ID = SequenceId("s")


def evidence(base_len: int, size: int = 8) -> Evidence:
    return Evidence(base_len, hidden=HiddenStates(base_len - 1, size // 2, bytes(size)))


def test_the_latest_hidden_states_keep_their_positions() -> None:
    hidden = HiddenStates(10, 2, bytes(range(12)))
    assert (len(hidden), hidden.end) == (3, 13)
    assert hidden.latest(2) == HiddenStates(11, 2, bytes(range(4, 12)))
    assert hidden.latest(5) == hidden


def test_evidence_is_taken_once_oldest_first() -> None:
    store = EvidenceStore()
    store.add(ID, evidence(3))
    store.add(ID, evidence(4))
    assert [one.base_len for one in store.take(ID)] == [3, 4]
    assert store.take(ID) == ()


def test_evidence_of_a_sequence_that_is_sent_again_replaces_the_old() -> None:
    store = EvidenceStore()
    for base_len in (600, 256, 512):
        store.add(ID, evidence(base_len))
    assert [one.base_len for one in store.take(ID)] == [256, 512]


@pytest.mark.parametrize(("size", "kept"), [(8, MAX_STEPS), (MAX_BYTES // 4, 4)])
def test_the_oldest_evidence_goes_first(size: int, kept: int) -> None:
    store = EvidenceStore()
    for base_len in range(1, MAX_STEPS + 10):
        store.add(ID, evidence(base_len, size))
    found = store.take(ID)
    assert [one.base_len for one in found] == list(range(MAX_STEPS + 10 - kept, MAX_STEPS + 10))


def test_a_call_takes_no_more_than_its_share() -> None:
    store = EvidenceStore()
    for base_len in (1, 2, 3):
        store.add(ID, evidence(base_len, 100))
    assert [one.base_len for one in store.take(ID, 200)] == [2, 3]
