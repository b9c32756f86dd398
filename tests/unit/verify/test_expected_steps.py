"""Tests which step of a target is expected next, and when that step is launched before its rows come."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from cluster.core.drafting import DraftBudget, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from workers.verify import ahead
from workers.verify.ahead import LaunchedRows, LaunchedStep, StepsAhead

BUDGET = DraftBudget(4, 4)


def rows_and_verdicts(count: int, base_len: int = 5) -> tuple[StepBatch, list[Verdict]]:
    names = [SequenceId(str(index)) for index in range(count)]
    return (
        StepBatch(tuple(VerifyRow(name, base_len, (3,)) for name in names)),
        [Verdict(name, base_len, (3,)) for name in names],
    )


def sequences(count: int, end: int = 2) -> Any:
    stored = SimpleNamespace(start=SequenceStart(1, SamplingParameters(end_token_ids=(end,))))
    return {SequenceId(str(index)): stored for index in range(count)}


def launched(batch: StepBatch) -> LaunchedStep:
    unused = cast("Any", None)
    return LaunchedStep(0.0, {}, LaunchedRows([], unused, [], unused, unused))


def records(*_: Sequence[VerifyRow]) -> bool:
    """Every pass records all that is needed."""
    return True


def test_steps_are_launched_while_nearly_all_come_as_expected() -> None:
    steps, forgotten = StepsAhead(lambda ready: forgotten.append(ready), records, is_on=True), list[Any]()

    def go(count: int, *, as_expected: bool = True) -> int:
        """How many of so many steps were launched ahead and used."""
        used = 0
        for number in range(count):
            batch, verdicts = rows_and_verdicts(2, 5 + number)
            steps.end(batch, verdicts)
            expected = steps.expect(sequences(2))
            if expected is not None:
                steps.hold(launched(expected))
            used += steps.take(rows_and_verdicts(2 if as_expected else 1, 6 + number)[0]) is not None
        return used

    assert go(150) == 0, "too little is known"
    assert go(100) > 40
    assert go(20, as_expected=False) == 0
    assert len(forgotten) < 5, "so few passes are lost"
    assert go(30) == 0
    assert go(300) > 100


@pytest.mark.parametrize("change", ["opens", "releases"])
def test_steps_that_other_calls_would_drop_count_as_not_expected(change: str) -> None:
    """While nothing is launched too: half of the launched ones would be lost."""
    steps, lost = StepsAhead(lambda _: None, records, is_on=True), 0
    for number in range(400):
        steps.end(*rows_and_verdicts(2, 5 + number))
        expected = steps.expect(sequences(2))
        if expected is not None:
            steps.hold(launched(expected))
        if number % 2:
            lost += expected is not None
            steps.drop() if change == "opens" else steps.release([SequenceId("1")])
            steps.expect(sequences(1))
        steps.take(rows_and_verdicts(1 if number % 2 else 2, 6 + number)[0])
    assert not lost


@pytest.mark.parametrize(("rows", "looked_at"), [(1, 36), (7, 36), (16, 12), (64, 4)])
def test_fewer_steps_of_many_rows_are_looked_at_while_few_come_as_expected(rows: int, looked_at: int) -> None:
    """What is found of a step delays its verdicts, which another thread sends."""
    steps, seen = StepsAhead(lambda _: None, records, is_on=True), 0
    stored = Mock(get=Mock(return_value=None))
    for number in range(36):
        steps.end(*rows_and_verdicts(rows, 5 + number))
        stored.get.reset_mock()
        assert steps.expect(stored) is None
        seen += stored.get.call_count > 0
        steps.take(rows_and_verdicts(rows, 6 + number)[0])
    assert seen == looked_at


def test_what_verdicts_do_not_say_is_not_expected() -> None:
    """A coordinator leaves out sequences that have ended, and those that it has released."""
    steps = StepsAhead(lambda _: None, records, is_on=True)
    batch, verdicts = rows_and_verdicts(3)

    def expected(verdicts: Sequence[Verdict], stored: Any) -> list[str] | None:
        steps.end(batch, verdicts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "LEAST_SHARE", 0.0)
            found = steps.expect(stored)
        return None if found is None else [row.sequence_id for row in found.rows]

    fault = RowFault(RowFaultCode.OUT_OF_SYNC, "")
    assert expected(verdicts, sequences(3)) == ["0", "1", "2"]
    assert expected(verdicts, sequences(2)) == ["0", "1"]
    assert expected([*verdicts[:2], Verdict(SequenceId("2"), 5, (2,))], sequences(3)) == ["0", "1"]
    assert expected(verdicts, sequences(3, end=3)) is None, "all have ended"
    for unknown in (Verdict(SequenceId("2"), 5), Verdict(SequenceId("2"), 5, fault=fault)):
        assert expected([*verdicts[:2], unknown], sequences(3)) is None, "nothing is decided"
    assert expected([*verdicts[:2], Verdict(SequenceId("2"), 5, (4,), forced=(9,))], sequences(3)) is None


def test_the_draft_of_a_verdict_is_expected_with_the_budget_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST_SHARE", 0.0)
    steps, name, tree = StepsAhead(lambda _: None, records, is_on=True), SequenceId("0"), TokenTree.chain((8, 9))
    row = VerifyRow(name, 5, (3,), TokenTree.chain((4, 6)), next_budget=BUDGET)
    steps.end(StepBatch((row,)), [Verdict(name, 5, (4, 7), 2, proposal=Proposal(name, 7, tree))])
    assert steps.expect(sequences(1)) == StepBatch((VerifyRow(name, 7, (7,), tree, next_budget=BUDGET),))
