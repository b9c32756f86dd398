"""Sessions are a cache of committed tokens: rows may be repeated, arrive late or follow a loss."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from workers.draft.common.sessions import Session, Sessions

BUDGET = DraftBudget(4, 4)


def row(name: str, base_len: int, new_tokens: tuple[int, ...], prompt_len: int | None = None) -> DraftRow:
    start = None if prompt_len is None else SequenceStart(prompt_len, SamplingParameters(seed=prompt_len))
    return DraftRow(SequenceId(name), base_len, new_tokens, BUDGET, start)


def first(name: str, *tokens: int) -> DraftRow:
    return row(name, len(tokens), tokens, prompt_len=len(tokens))


def held(sessions: Sessions[Session], message: DraftRow) -> list[int]:
    session = sessions.apply(message)
    assert isinstance(session, Session)
    return list(session.tokens)


def fault(sessions: Sessions[Session], message: DraftRow) -> RowFault:
    found = sessions.apply(message)
    assert isinstance(found, RowFault)
    return found


def test_new_tokens_follow_the_known_ones() -> None:
    sessions = Sessions(Session)
    assert held(sessions, first("a", 1, 2, 3)) == [1, 2, 3]
    assert held(sessions, row("a", 5, (4, 5))) == [1, 2, 3, 4, 5]


def test_a_repeated_row_changes_nothing() -> None:
    sessions = Sessions(Session)
    held(sessions, first("a", 1, 2, 3))
    assert held(sessions, row("a", 5, (4, 5))) == held(sessions, row("a", 5, (4, 5)))


def test_tokens_beyond_the_known_length_are_replaced() -> None:
    sessions = Sessions(Session)
    held(sessions, first("a", 1, 2, 3, 4, 5))
    assert held(sessions, row("a", 4, (8, 9))) == [1, 2, 8, 9]


def test_a_row_that_arrives_late_puts_its_successor_out_of_sync() -> None:
    sessions = Sessions(Session)
    held(sessions, first("a", 1, 2))
    held(sessions, row("a", 4, (3, 4)))
    held(sessions, row("a", 3, (3,)))  # sent before the one above
    assert fault(sessions, row("a", 5, (5,))).stored_len == 3
    assert held(sessions, row("a", 5, (4, 5))) == [1, 2, 3, 4, 5]


def test_an_unknown_sequence_is_out_of_sync() -> None:
    assert fault(Sessions(Session), row("a", 3, (3,))).code is RowFaultCode.OUT_OF_SYNC


def test_a_gap_is_out_of_sync_and_the_fault_names_the_stored_length() -> None:
    sessions = Sessions(Session)
    held(sessions, first("a", 1, 2, 3))
    found = fault(sessions, row("a", 6, (6,)))
    assert (found.code, found.stored_len) == (RowFaultCode.OUT_OF_SYNC, 3)
    assert held(sessions, row("a", 4, (4,))) == [1, 2, 3, 4]


def test_a_start_replaces_all_tokens_and_parameters() -> None:
    sessions = Sessions(Session)
    held(sessions, first("a", 1, 2, 3))
    session = sessions.apply(row("a", 2, (7, 8), prompt_len=1))
    assert isinstance(session, Session)
    assert session.tokens == [7, 8]
    assert session.start == SequenceStart(1, SamplingParameters(seed=1))


def test_rows_that_contradict_themselves_are_invalid_and_change_nothing() -> None:
    sessions = Sessions(Session, vocabulary_size=10)
    held(sessions, first("a", 1, 2, 3))
    wrong = [
        row("a", 1, (1, 2)),  # more tokens than its length
        row("a", 0, ()),
        row("a", 4, (4,), prompt_len=1),  # a start without the whole sequence
        row("a", 2, (1, 2), prompt_len=3),  # a prompt beyond the sequence
        row("a", 4, (10,)),  # outside the vocabulary
    ]
    assert [fault(sessions, message).code for message in wrong] == [RowFaultCode.INVALID] * len(wrong)
    assert held(sessions, row("a", 4, (9,))) == [1, 2, 3, 9]


def test_a_row_without_a_budget_may_bring_a_part_of_the_prompt() -> None:
    sessions = Sessions(Session)
    part = replace(row("a", 2, (1, 2), prompt_len=4), budget=NO_DRAFT)
    assert held(sessions, part) == [1, 2]
    assert held(sessions, row("a", 5, (3, 4, 5))) == [1, 2, 3, 4, 5]


def test_released_sequences_are_dropped_and_unknown_ones_are_no_error() -> None:
    discarded: list[Session] = []
    sessions = Sessions(Session, discarded.append)
    held(sessions, first("a", 1))
    sessions.release([SequenceId("a"), SequenceId("b"), SequenceId("a")])
    assert [session.tokens for session in discarded] == [[1]]
    assert fault(sessions, row("a", 2, (2,))).code is RowFaultCode.OUT_OF_SYNC


def test_beyond_the_bound_the_least_recently_used_sequence_is_evicted() -> None:
    discarded: list[Session] = []
    sessions = Sessions(Session, discarded.append, most=2)
    held(sessions, first("a", 1))
    held(sessions, first("b", 2))
    held(sessions, row("a", 2, (1,)))
    held(sessions, first("c", 3))
    assert len(sessions) == 2
    assert [session.tokens for session in discarded] == [[2]]
    assert fault(sessions, row("b", 2, (2,))).code is RowFaultCode.OUT_OF_SYNC
    assert held(sessions, row("a", 3, (1,))) == [1, 1, 1]
