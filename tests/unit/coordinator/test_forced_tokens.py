"""Forced tokens are a chain of every row that has room for it; what a drafter proposes after the chain stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.coordinator.verify import with_forced
from cluster.core.config.sections import SchedulerSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftDistribution, Proposal
from cluster.core.ids import RequestId, SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import FinishReason, GenerationRequest, StoppingCriteria
from cluster.core.scheduling.scheduler import plan
from cluster.core.scheduling.state import PlannedRow, SequenceView, State
from cluster.core.sequence import Sequence
from cluster.core.tree import TokenTree
from cluster.core.verification import Verdict

NONE = DraftBudget(0, 0)
NAME = SequenceId("s")
CHAIN = (10, 11, 12)


def sequence(most: int = 50) -> Sequence:
    request = GenerationRequest(RequestId("r"), (1, 2, 3), stopping=StoppingCriteria(max_tokens=most))
    found = Sequence(NAME, request, 0)
    found.commit(Verdict(NAME, 3, (5,), forced=CHAIN))
    return found


def planned(most: int, depth: int, forced: int = 3) -> PlannedRow:
    return PlannedRow(NAME, 1, True, DraftBudget(most, depth), forced)


def draft(*candidates: list[int]) -> Proposal:
    return Proposal(NAME, 4, TokenTree.from_candidates(candidates, max_nodes=32))


def test_without_a_draft_the_row_has_the_chain() -> None:
    assert with_forced(None, sequence(), planned(0, 0)).tree == TokenTree.chain(CHAIN)
    assert with_forced(None, sequence(), planned(0, 0, 2)).tree == TokenTree.chain(CHAIN[:2])


def test_a_draft_goes_on_after_the_chain() -> None:
    found = with_forced(draft([9, 9], [*CHAIN, 20, 21], [*CHAIN, 30], [10, 40]), sequence(), planned(8, 5)).tree
    assert found == TokenTree((10, 11, 12, 20, 21, 30), (-1, 0, 1, 2, 3, 2))


def test_forced_nodes_come_from_the_grammar_and_the_others_from_where_they_were_drafted() -> None:
    trained = replace(draft([*CHAIN, 20, 21]), origins=(DraftOrigin.TRAINED,) * 5)
    found = with_forced(trained, sequence(), planned(8, 5))
    assert found.origins == (*[DraftOrigin.FORCED] * 3, *[DraftOrigin.TRAINED] * 2)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (planned(4, 8), TokenTree.chain((*CHAIN, 20))),
        (planned(8, 4), TokenTree((*CHAIN, 20, 30), (-1, 0, 1, 2, 2))),
        (planned(2, 2), TokenTree.chain(CHAIN)),
    ],
)
def test_the_draft_stays_within_its_budget(row: PlannedRow, expected: TokenTree) -> None:
    assert with_forced(draft([*CHAIN, 20, 21], [*CHAIN, 30]), sequence(), row).tree == expected


@pytest.mark.parametrize(
    "other",
    [
        draft([10, 11], [9]),
        replace(draft([*CHAIN, 20]), is_prunable=False),
        replace(draft([*CHAIN, 20]), distributions=(DraftDistribution((1,), (1.0,)),) * 4),
    ],
)
def test_a_draft_that_cannot_go_on_is_left_out(other: Proposal) -> None:
    found = with_forced(other, sequence(), planned(8, 8))
    assert (found.tree, found.distributions) == (TokenTree.chain(CHAIN), ())


def test_a_sequence_keeps_the_forced_tokens_until_its_next_commit() -> None:
    found = sequence()
    found.opened(0)
    before = found.forced
    assert found.commit(Verdict(NAME, 4, (10, 11))) is not None
    assert (before, found.forced) == (CHAIN, ())
    ended = sequence(most=2)
    commit = ended.commit(Verdict(NAME, 4, (10,), forced=CHAIN))
    assert commit is not None
    assert commit.finish is FinishReason.LENGTH
    assert ended.forced == ()


@pytest.mark.parametrize(
    ("changes", "tokens", "draft_nodes", "forced"),
    [
        ({}, 64, 0, 3),
        ({"draft": DraftBudget(6, 4)}, 64, 6, 3),
        ({"draft": DraftBudget(2, 2)}, 64, 2, 3),
        ({"max_draft_tokens": 0}, 64, 0, 0),
        ({"max_draft_tokens": 2}, 64, 0, 2),
        ({"remaining": 3}, 64, 0, 2),
        ({"remaining": 1}, 64, 0, 0),
    ],
)
def test_the_scheduler_has_room_for_forced_tokens(
    changes: dict[str, object], tokens: int, draft_nodes: int, forced: int
) -> None:
    view = replace(SequenceView(NAME, 0, 9, 8, 100, draft=NONE, forced=3), **changes)  # type: ignore[arg-type]
    limits = SchedulerSection(max_sequences=8, max_step_tokens=tokens)
    state = State((), (view,), KvOccupancy(100, 100), KvLayout(4), 1000, limits, max_draft=DraftBudget(8, 8))
    (row,) = plan(state).rows
    assert (row.draft.max_nodes, row.forced) == (draft_nodes, forced)
