"""A method of a combination is suspended while it costs more than it adds, and then asked again without a fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Evidence, HiddenStates, Proposal, RowFault
from cluster.core.evidence_store import MAX_BYTES
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from workers.draft.common.combination import Combination
from workers.draft.common.method_value import FIRST_PAUSE_SECONDS, LOSS_SHARE, MissedRows
from workers.draft.common.sessions import MOST_SESSIONS, Session, Sessions

ID = SequenceId("s")
START = SequenceStart(1, SamplingParameters(temperature=0.0))
BUDGET = DraftBudget(8, 4)
STEP_SECONDS = 0.01
RIGHT = 7
"""The token that the target always decides."""


class Clock:
    """Seconds that only this test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedMethod:
    """Drafts a chain of one token, and takes a given time. It stores the sequences as all methods do."""

    def __init__(self, clock: Clock, token: int, depth: int, seconds: float) -> None:
        self._clock, self._tree, self._seconds = clock, TokenTree.chain([token] * depth), seconds
        self._sessions = Sessions(Session)
        self.calls = 0
        self.seconds = 0.0

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self.calls += 1
        self._clock.now += self._seconds
        self.seconds += self._seconds
        return tuple(self._propose(row) for row in rows)

    def _propose(self, row: DraftRow) -> Proposal:
        session = self._sessions.apply(row)
        if isinstance(session, RowFault):
            return Proposal(row.sequence_id, row.base_len, fault=session)
        assert len(session.tokens) == row.base_len
        return Proposal(row.sequence_id, row.base_len, self._tree)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._sessions.release(sequence_ids)


class BoundMethod(TimedMethod):
    """A method that computes with the target's layers."""

    def bind(self, target: object) -> None:
        """The target is not needed."""


def decode(method: Combination, clock: Clock, rounds: int, name: SequenceId = ID) -> int:
    """Let a target that always decides `RIGHT` verify the proposals. Returns the number of accepted tokens."""
    base_len, new, accepted = 1, (RIGHT,), 0
    for _ in range(rounds):
        start = START if len(new) == base_len else None
        (proposal,) = method.propose([DraftRow(name, base_len, new, BUDGET, start)])
        assert proposal.fault is None
        clock.now += STEP_SECONDS
        depth = max((len(path) for path in proposal.tree.candidates() if set(path) == {RIGHT}), default=0)
        accepted += depth
        new = (RIGHT,) * (depth + 1)
        base_len += depth + 1
    return accepted


def test_a_method_that_costs_more_than_it_adds_is_suspended_and_the_other_goes_on() -> None:
    clock = Clock()
    cheap, costly = TimedMethod(clock, RIGHT, 1, 0.00001), TimedMethod(clock, RIGHT, 1, 0.02)
    method = Combination([cheap, costly], [False, True], clock)
    assert method.reads_hidden
    accepted = decode(method, clock, 3000)
    assert cheap.calls == 3000
    assert costly.calls < 100
    assert accepted >= 3000
    assert not method.reads_hidden
    assert costly.seconds < 1.5 * LOSS_SHARE * clock.now


def test_a_method_that_adds_more_than_it_costs_is_always_asked() -> None:
    clock = Clock()
    weak, strong = TimedMethod(clock, 3, 2, 0.00001), TimedMethod(clock, RIGHT, 4, 0.005)
    decode(Combination([weak, strong], (), clock), clock, 300)
    assert strong.calls == 300
    assert weak.calls == 300  # it adds nothing, and costs next to nothing


def test_a_suspended_method_is_tried_again_with_all_tokens_that_it_missed() -> None:
    clock = Clock()
    costly = TimedMethod(clock, 3, 2, 0.02)
    method = Combination([TimedMethod(clock, RIGHT, 1, 0.00001), costly], (), clock)
    decode(method, clock, 50)
    tried = costly.calls
    assert tried < 50
    clock.now += FIRST_PAUSE_SECONDS / LOSS_SHARE
    decode(method, clock, 50, SequenceId("another"))  # the method stores all tokens, or it asserts
    assert costly.calls > tried


def test_a_method_on_all_ranks_of_the_target_is_never_suspended() -> None:
    clock = Clock()
    bound = BoundMethod(clock, 3, 2, 0.05)
    decode(Combination([TimedMethod(clock, RIGHT, 1, 0.00001), bound], (), clock), clock, 100)
    assert bound.calls == 100


def test_without_the_controller_all_methods_are_always_asked() -> None:
    clock = Clock()
    costly = TimedMethod(clock, 3, 2, 0.05)
    methods = [TimedMethod(clock, RIGHT, 1, 0.00001), costly]
    decode(Combination(methods, (), clock, suspends=False), clock, 100)
    assert costly.calls == 100


def test_all_methods_may_be_suspended_and_are_resumed() -> None:
    clock = Clock()
    methods = [TimedMethod(clock, 3, 1, 0.02), TimedMethod(clock, 4, 1, 0.02)]
    decode(Combination(methods, (), clock), clock, 2000)
    assert all(8 < one.calls < 200 for one in methods)


@pytest.mark.parametrize("late", [False, True])
def test_missed_rows_are_joined(late: bool) -> None:
    missed = MissedRows()
    missed.add([DraftRow(ID, 2, (4, 5), BUDGET, START)])
    missed.add([DraftRow(ID, 4, (6, 7), BUDGET)])
    if late:
        missed.add([DraftRow(ID, 3, (8,), BUDGET)])  # replaces the tokens after the second
    known = 3 if late else 4
    (row,) = missed.with_missed([DraftRow(ID, known + 1, (9,), BUDGET)])
    assert row.new_tokens == ((4, 5, 8, 9) if late else (4, 5, 6, 7, 9))
    assert (row.start, row.known_len) == (START, 0)
    later = DraftRow(ID, known + 2, (9,), BUDGET)
    assert missed.with_missed([later]) == [later]


def test_released_sequences_have_missed_nothing() -> None:
    missed = MissedRows()
    missed.add([DraftRow(ID, 2, (4, 5), BUDGET, START)])
    missed.release([ID, SequenceId("unknown")])
    row = DraftRow(ID, 3, (6,), BUDGET)
    assert missed.with_missed([row]) == [row]


def test_of_too_many_sequences_the_one_that_was_idle_longest_is_forgotten() -> None:
    missed, ids = MissedRows(), [SequenceId(str(number)) for number in range(MOST_SESSIONS + 1)]
    missed.add([DraftRow(name, 2, (4, 5), NO_DRAFT, START) for name in ids[:-1]])
    missed.add([DraftRow(ids[0], 3, (6,), NO_DRAFT)])
    missed.add([DraftRow(ids[-1], 2, (4, 5), NO_DRAFT, START)])
    first, second = missed.with_missed([DraftRow(ids[0], 4, (7,), BUDGET), DraftRow(ids[1], 3, (7,), BUDGET)])
    assert (first.start, first.new_tokens) == (START, (4, 5, 6, 7))
    assert (second.start, second.new_tokens) == (None, (7,))


def test_the_hidden_states_of_a_suspended_method_are_bounded_by_their_bytes() -> None:
    missed, width, positions = MissedRows(), 1024, 2048
    for number in range(10):
        hidden = HiddenStates(number * positions, width, bytes(2 * width * positions))
        first, end = number * positions, (number + 1) * positions
        evidence = (Evidence(end, hidden=hidden),)
        start = START if number == 0 else None
        missed.add([DraftRow(ID, end, (1,) * (end - first), NO_DRAFT, start, evidence)])
    (row,) = missed.with_missed([DraftRow(ID, 10 * positions + 1, (2,), BUDGET)])
    kept = [evidence.hidden for evidence in row.evidence if evidence.hidden is not None]
    assert 0 < sum(len(hidden.data) for hidden in kept) <= MAX_BYTES
    assert kept[-1].end == 10 * positions
    assert len(row.new_tokens) == 10 * positions + 1
