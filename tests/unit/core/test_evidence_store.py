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


@pytest.mark.parametrize(("size", "kept"), [(8, MAX_STEPS), (MAX_BYTES // 4, 3)])
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


def test_all_sequences_have_a_bound_together_and_the_one_with_the_most_loses_its_oldest() -> None:
    """Many clients whose drafters are away do not fill the memory, and one long prompt costs no other its evidence."""
    store = EvidenceStore(most_total_bytes=1000)
    small = [SequenceId(f"small{number}") for number in range(5)]
    for name in small:
        store.add(name, evidence(1, 80))
    for base_len in range(1, 100):
        store.add(ID, evidence(base_len, 40))
        assert sum(map(store.size, [ID, *small])) <= 1000
    assert [store.size(name) for name in small] == [80] * 5
    kept = [one.base_len for one in store.take(ID)]
    assert kept == list(range(100 - len(kept), 100))
    assert len(kept) > 8
    for base_len in range(1, 16):
        store.add(ID, evidence(base_len, 40))
    assert store.size(ID) == 600


@pytest.mark.parametrize("most_bytes", [MAX_BYTES, MAX_BYTES // 2])
def test_of_a_step_that_is_too_large_the_latest_positions_are_kept(most_bytes: int) -> None:
    """A long chunk of a prompt alone exceeds the bound, and drafts read its last positions first.

    Three quarters of the bound are left, so that no further step copies the chunk again.
    """
    store, position = EvidenceStore(), MAX_BYTES // 8
    chunk = HiddenStates(0, position // 2, bytes(9 * position) + b"\x01" * position)
    store.add(ID, Evidence(10, hidden=chunk))
    store.add(ID, evidence(11))
    prompt, step = store.take(ID, most_bytes)
    kept = min(6, most_bytes // position - 1)  # the step after it has a few bytes, too
    assert prompt.base_len == 10
    assert prompt.hidden == HiddenStates(10 - kept, position // 2, bytes(chunk.data[-kept * position :]))
    assert step == evidence(11)
