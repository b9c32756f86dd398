"""A sequence: what verdicts and openings change."""

from __future__ import annotations

import pytest

from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import InvalidRequest
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import FinishReason, GenerationRequest, StoppingCriteria, TokenLogprobs
from cluster.core.sequence import Sequence
from cluster.core.verification import Verdict

ID = SequenceId("s")


def sequence(max_tokens: int = 10, stop: frozenset[int] = frozenset()) -> Sequence:
    """Four tokens of prompt."""
    stopping = StoppingCriteria(max_tokens=max_tokens, stop_token_ids=stop)
    return Sequence(ID, GenerationRequest(RequestId("r"), (1, 2, 3, 4), stopping=stopping), arrival=1)


def decided(base_len: int, *tokens: int, drafted: int = 0) -> Verdict:
    return Verdict(ID, base_len, tokens, drafted)


def faulted(code: RowFaultCode) -> Verdict:
    return Verdict(ID, 4, fault=RowFault(code, "why"))


def test_a_new_sequence_has_everything_to_send() -> None:
    new = sequence()
    assert (len(new), new.stored_len, new.missing, new.remaining) == (4, 0, 4, 10)
    assert new.start.prompt_len == 4


def test_a_prompt_chunk_is_stored_and_adds_nothing() -> None:
    filling = sequence()
    assert filling.commit(decided(3)) is None
    assert (filling.stored_len, filling.missing, len(filling)) == (3, 1, 4)


def test_an_accepted_path_is_stored_and_the_targets_own_token_is_not_yet() -> None:
    running = sequence()
    commit = running.commit(decided(4, 5, 6, 7, drafted=4))
    assert commit is not None
    assert (commit.tokens, commit.accepted, commit.drafted, commit.finish) == ((5, 6, 7), 2, 4, None)
    assert running.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert (running.stored_len, running.missing, running.remaining) == (6, 1, 7)


def test_the_answer_is_cut_at_its_length_and_the_usage_counts_the_tokens_left() -> None:
    ending = sequence(max_tokens=2)
    commit = ending.commit(decided(4, 5, 6, 7, 8, drafted=3))
    assert commit is not None and commit.usage is not None
    assert (commit.tokens, commit.accepted, commit.finish) == ((5, 6), 2, FinishReason.LENGTH)
    assert (commit.usage.completion_tokens, commit.usage.drafted_tokens, commit.usage.accepted_tokens) == (2, 3, 2)
    assert commit.usage.target_steps == 1


def test_the_answer_is_cut_after_its_stop_token() -> None:
    ending = sequence(stop=frozenset({6}))
    commit = ending.commit(decided(4, 5, 6, 7, drafted=2))
    assert commit is not None
    assert (commit.tokens, commit.accepted, commit.finish) == ((5, 6), 2, FinishReason.STOP)


def test_a_stop_token_at_the_length_bound_counts_as_a_stop() -> None:
    commit = sequence(max_tokens=1, stop=frozenset({5})).commit(decided(4, 5))
    assert commit is not None and commit.finish is FinishReason.STOP


def test_a_stop_token_beyond_the_length_bound_does_not_count() -> None:
    commit = sequence(max_tokens=1, stop=frozenset({6})).commit(decided(4, 5, 6, drafted=1))
    assert commit is not None and (commit.tokens, commit.finish) == ((5,), FinishReason.LENGTH)


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    commit = sequence(stop=frozenset({2})).commit(decided(4, 5))
    assert commit is not None and commit.finish is None


def test_logprobs_are_cut_with_their_tokens() -> None:
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (5, 6, 7))
    commit = sequence(max_tokens=2).commit(Verdict(ID, 4, (5, 6, 7), 2, logprobs))
    assert commit is not None and commit.logprobs == logprobs[:2]


@pytest.mark.parametrize("verdict", [decided(3, 9), decided(4, 9), decided(6, 9), decided(4), decided(6)], ids=str)
def test_a_verdict_from_another_length_is_dropped(verdict: Verdict) -> None:
    running = sequence()
    running.commit(decided(4, 5))
    usage = running.usage()
    assert running.commit(verdict) is None
    assert (running.tokens, running.stored_len, running.usage()) == ([1, 2, 3, 4, 5], 4, usage)


def test_a_verdict_counts_once() -> None:
    running = sequence()
    assert running.commit(decided(4, 5)) is not None
    assert running.commit(decided(4, 5)) is None
    assert running.tokens == [1, 2, 3, 4, 5]


def test_a_whole_sequence_is_never_stored_without_a_decision() -> None:
    running = sequence()
    assert running.commit(decided(4)) is None
    assert running.missing == 4


def test_a_chunk_that_decides_before_the_end_is_dropped() -> None:
    running = sequence()
    assert running.commit(decided(3, 9)) is None
    assert (running.missing, len(running)) == (4, 4)


def test_a_lost_sequence_is_sent_from_the_start_and_keeps_its_tokens() -> None:
    running = sequence()
    running.commit(decided(4, 5, 6, drafted=1))
    assert running.commit(faulted(RowFaultCode.OUT_OF_SYNC)) is None
    assert (running.tokens, running.stored_len, running.missing) == ([1, 2, 3, 4, 5, 6], 0, 6)
    assert running.commit(decided(6, 7)) is not None
    assert (running.stored_len, running.tokens[-1]) == (6, 7)


@pytest.mark.parametrize("code", [RowFaultCode.KV_EXHAUSTED, RowFaultCode.INVALID])
def test_other_faults_change_nothing(code: RowFaultCode) -> None:
    running = sequence()
    running.commit(decided(3))
    assert running.commit(faulted(code)) is None
    assert running.stored_len == 3


def test_a_finished_sequence_ignores_further_verdicts() -> None:
    ended = sequence(max_tokens=1)
    ended.commit(decided(4, 5))
    assert ended.commit(decided(5, 6)) is None
    assert ended.commit(faulted(RowFaultCode.OUT_OF_SYNC)) is None
    assert ended.tokens == [1, 2, 3, 4, 5]


# --- what the target holds ----------------------------------------------------------------------


def test_an_opened_sequence_sends_what_the_target_does_not_hold_yet() -> None:
    found = sequence()
    found.opened(3)
    assert (found.stored_len, found.missing, found.tokens) == (3, 1, [1, 2, 3, 4])
    assert found.commit(decided(4, 5)) is not None


def test_opening_again_replaces_the_stored_length_and_changes_no_token() -> None:
    running = sequence()
    running.commit(decided(4, 5, 6, drafted=1))
    usage = running.usage()
    running.opened(0)
    assert (running.stored_len, running.missing) == (0, 6)
    running.opened(4)
    assert (running.stored_len, running.missing) == (4, 2)
    assert (running.tokens, running.usage()) == ([1, 2, 3, 4, 5, 6], usage)


@pytest.mark.parametrize("stored_len", [-1, 4, 5])
def test_a_stored_length_always_leaves_a_token_to_send(stored_len: int) -> None:
    with pytest.raises(InvalidRequest, match="stored_len"):
        sequence().opened(stored_len)


def test_a_verdict_from_before_an_opening_is_dropped() -> None:
    running = sequence()
    running.opened(3)
    assert running.commit(decided(3)) is None
    assert running.stored_len == 3


def test_the_start_carries_the_salt() -> None:
    salted = Sequence(ID, GenerationRequest(RequestId("r"), (1,), cache_salt="tenant"), arrival=1)
    assert salted.start.cache_salt == "tenant"


@pytest.mark.parametrize(
    ("stop", "tokens", "accepted", "finish"),
    [
        (frozenset(), (5, 9), 1, FinishReason.LENGTH),
        (frozenset({9}), (5, 9), 1, FinishReason.LENGTH),
        (frozenset({6}), (5, 6), 2, FinishReason.STOP),
        (frozenset({6, 9}), (5, 6), 2, FinishReason.STOP),
    ],
)
def test_the_forced_last_token_replaces_the_decision_at_the_length_bound(
    stop: frozenset[int], tokens: tuple[int, ...], accepted: int, finish: FinishReason
) -> None:
    stopping = StoppingCriteria(max_tokens=2, stop_token_ids=stop, forced_eos_token_id=9)
    request = GenerationRequest(RequestId("r"), (1, 2, 3, 4), stopping=stopping)
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (5, 6, 7))
    commit = Sequence(ID, request, arrival=1).commit(Verdict(ID, 4, (5, 6, 7), 2, logprobs))
    assert commit is not None
    assert (commit.tokens, commit.accepted, commit.finish) == (tokens, accepted, finish)
    assert [entry.token for entry in commit.logprobs] == list(tokens)


@pytest.mark.parametrize("decided", [9, 6])
def test_an_answer_with_the_forced_last_token_ends_by_its_length_whatever_was_decided(decided: int) -> None:
    stopping = StoppingCriteria(max_tokens=2, stop_token_ids=frozenset({9}), forced_eos_token_id=9)
    request = GenerationRequest(RequestId("r"), (1, 2, 3, 4), stopping=stopping)
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (5, decided))
    commit = Sequence(ID, request, arrival=1).commit(Verdict(ID, 4, (5, decided), 2, logprobs))
    assert commit is not None
    assert (commit.tokens, commit.finish) == ((5, 9), FinishReason.LENGTH)
    assert commit.logprobs[-1] == TokenLogprobs(9, 0.0)
    assert [stopping.finish_after(9, count) for count in (1, 2)] == [FinishReason.STOP, FinishReason.LENGTH]


def test_the_start_of_a_sequence_holds_its_source() -> None:
    request = GenerationRequest(RequestId("r"), (0,), source=(7, 8, 9))
    assert Sequence(ID, request, arrival=1).start.source == (7, 8, 9)
