"""From a plan to the rows of a step, and from a verdict back to its row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.coordinator.commit import is_valid
from cluster.coordinator.quarantine import MAX_LOSSES
from cluster.coordinator.requests.decoding_strategy import NewSequence
from cluster.coordinator.requests.live_sequence import QUARANTINE_LOSSES, LiveSequence
from cluster.coordinator.verify import build_rows
from cluster.core.drafting import NO_DRAFT, DraftBudget, Proposal, RowFault, RowFaultCode
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import GenerationRequest, StoppingCriteria
from cluster.core.scheduling.state import Plan, PlannedRow
from cluster.core.sequence import Sequence
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import Verdict, VerifyRow

ID = SequenceId("s")
DRAFT = Proposal(ID, 5, TokenTree((7, 8, 9, 10), (-1, 0, 1, -1)))


def live_sequence(parent: LiveSequence | None = None) -> LiveSequence:
    """A sequence with a prompt of five tokens."""
    request = GenerationRequest(RequestId("r"), (1, 2, 3, 4, 5), stopping=StoppingCriteria(max_tokens=20))
    return LiveSequence(Sequence(ID, request, 0), request.request_id, NewSequence(0, request, 0), parent)


def planned(pending: int, *, decide: bool, draft: DraftBudget = NO_DRAFT) -> Plan:
    """A plan of one row."""
    return Plan(rows=(PlannedRow(ID, pending, decide, draft),))


def test_the_first_row_of_a_sequence_carries_its_start() -> None:
    live = live_sequence()
    (row,) = build_rows(planned(3, decide=False), {ID: live}, {})
    assert row == VerifyRow(ID, 3, (1, 2, 3), EMPTY_TREE, decide=False, start=live.sequence.start)
    live.mark_stored(3)
    (row,) = build_rows(planned(2, decide=True), {ID: live}, {})
    assert row == VerifyRow(ID, 5, (4, 5), EMPTY_TREE, decide=True, start=None)


@pytest.mark.parametrize("is_prunable", [True, False])
def test_a_tree_is_cut_to_what_the_plan_allows(is_prunable: bool) -> None:
    live, draft = live_sequence(), replace(DRAFT, is_prunable=is_prunable)
    (row,) = build_rows(planned(5, decide=True, draft=DraftBudget(3, 2)), {ID: live}, {ID: draft})
    assert row.tree == TokenTree((7, 8, 10), (-1, 0, -1))
    (undecided,) = build_rows(planned(4, decide=False), {ID: live}, {ID: DRAFT})
    assert undecided.tree == EMPTY_TREE


def test_a_sequence_that_has_left_has_no_row() -> None:
    assert build_rows(planned(5, decide=True), {}, {ID: DRAFT}) == ()


def test_building_rows_changes_nothing() -> None:
    parent = live_sequence()
    parent.mark_sent()
    live = live_sequence(parent)
    build_rows(planned(5, decide=True), {ID: live}, {ID: DRAFT})
    assert (live.is_open, live.has_been_open, live.kv_source) == (False, False, parent)
    assert (live.sequence.stored_len, live.sequence.tokens) == (0, [1, 2, 3, 4, 5])
    live.mark_sent()
    assert (live.is_open, live.has_been_open, live.kv_source) == (True, True, None)


def test_a_sequence_is_quarantined_before_it_is_given_up() -> None:
    live = live_sequence()
    quarantined_after = [losses for _ in range(MAX_LOSSES) if (losses := live.record_loss()) and live.is_quarantined]
    assert quarantined_after == list(range(QUARANTINE_LOSSES, MAX_LOSSES + 1))
    live.record_progress(VerifyRow(ID, 1, (1,)), 0)
    assert not live.is_quarantined


def test_losses_count_until_the_target_gets_past_the_lost_row() -> None:
    live = live_sequence()
    earlier, lost = VerifyRow(ID, 8, (1,) * 8, decide=False), VerifyRow(ID, 9, (1,), decide=False)
    live.record_loss(lost)
    live.record_progress(earlier, 0)
    assert live.losses == 1
    live.record_loss()  # an opening: it does not tell where the step before it was lost
    live.record_progress(earlier, 0)
    assert live.losses == 2
    live.record_progress(lost, 0)
    assert live.losses == 0
    live.record_loss()
    live.record_progress(earlier, 0)
    assert live.losses == 0


def test_losses_with_drafts_count_until_drafts_are_computed_or_the_sequence_is_longer() -> None:
    live, plain = live_sequence(), VerifyRow(ID, 5, (5,))
    drafted, drafting = replace(plain, tree=DRAFT.tree), replace(plain, next_budget=DraftBudget(4, 2))
    for lost in (drafted, drafting, replace(drafted, next_budget=DraftBudget(4, 2))):
        assert live.record_loss(lost) == 1
        longest = 5 + lost.tree.depth() + lost.next_budget.max_depth
        for other in (plain, replace(plain, base_len=longest - 1), drafted, drafting):
            if other is not lost:
                live.record_progress(other, 0)
        assert live.losses == 1
        live.record_progress(lost, 0)
        assert live.losses == 0
        live.record_loss(lost)
        live.record_progress(replace(plain, base_len=longest), 0)
        assert live.losses == 0


def test_a_sequence_that_was_lost_alone_has_no_drafts_any_more() -> None:
    live, largest = live_sequence(), DraftBudget(6, 4)
    row = VerifyRow(ID, 5, (1, 2, 3, 4, 5))
    for _ in range(QUARANTINE_LOSSES):
        live.record_loss(row)
    assert live.largest_draft(largest) == largest  # others were in those calls
    live.record_loss(row)
    live.record_progress(row, 0)
    assert not live.is_quarantined
    assert (live.largest_draft(largest), live.view(None, 0.0).max_draft_tokens) == (NO_DRAFT, 0)


@pytest.mark.parametrize(
    ("verdict", "valid"),
    [
        (Verdict(ID, 5, (7,)), True),
        (Verdict(ID, 5, (7, 8, 9, 1)), True),
        (Verdict(ID, 5, (7, 8, 9, 10, 1)), False),
        (Verdict(ID, 5, ()), False),
        (Verdict(ID, 4, (7,)), False),
        (Verdict(ID, 5, fault=RowFault(RowFaultCode.OUT_OF_SYNC, "lost")), True),
    ],
    ids=str,
)
def test_a_verdict_has_one_token_more_than_the_accepted_path(verdict: Verdict, valid: bool) -> None:
    assert is_valid(VerifyRow(ID, 5, (5,), DRAFT.tree), verdict) is valid


def test_a_verdict_on_a_prompt_chunk_has_no_tokens() -> None:
    row = VerifyRow(ID, 3, (1, 2, 3), decide=False)
    assert is_valid(row, Verdict(ID, 3))
    assert not is_valid(row, Verdict(ID, 3, (7,)))
