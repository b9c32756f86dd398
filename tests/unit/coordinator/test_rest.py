"""Rounds in which nothing about drafts is decided, because they do not pay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from cluster.coordinator.drafting.rest import Rest, RestedRounds
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import VerifyRow
from cluster.speculation.controller import SpeculationController
from tests.support.fakes.simulated_time import (
    DrafterModel,
    DraftingTarget,
    SimulatedCluster,
    cpu_step,
    equal_requests,
    simulate,
)

PRESENT = [SequenceId("a"), SequenceId("b")]


def rows(trees: Iterable[TokenTree]) -> list[VerifyRow]:
    return [VerifyRow(one, 5, (1,), tree) for one, tree in zip(PRESENT, trees, strict=False)]


def test_a_rest_lasts_as_long_as_it_was_given() -> None:
    rest = Rest()
    rest.begin(PRESENT, 2, 3)
    assert [rest.goes_on(list(PRESENT)) for _ in range(5)] == [True, True, True, False, False]


def test_a_rest_ends_when_other_sequences_come() -> None:
    rest = Rest()
    rest.begin(PRESENT, 2, 8)
    assert rest.goes_on(PRESENT)
    assert not rest.goes_on([*PRESENT, SequenceId("c")])
    assert not rest.goes_on(PRESENT)


@pytest.mark.parametrize("trees", [[EMPTY_TREE], [EMPTY_TREE, TokenTree.chain([3])]])
def test_a_round_unlike_the_others_ends_a_rest_and_is_not_timed(trees: list[TokenTree]) -> None:
    rest = Rest()
    rest.begin(PRESENT, 2, 8)
    assert rest.goes_on(PRESENT)
    rest.add(rows([EMPTY_TREE, EMPTY_TREE]), 0.25)
    assert rest.goes_on(PRESENT)
    rest.add(rows(trees), 9.0)
    assert not rest.goes_on(PRESENT)
    assert rest.take() == RestedRounds(rows=2, rounds=2, timed=1, seconds=0.25)
    assert rest.take() is None


def test_most_rounds_with_useless_drafts_decide_nothing_about_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    decide = SpeculationController.next_budgets

    def counted(controller: SpeculationController, rows: int) -> Mapping[SequenceId, DraftBudget]:
        decided.append(rows)
        return decide(controller, rows)

    monkeypatch.setattr(SpeculationController, "next_budgets", counted)

    async def scenario() -> int:
        target = DraftingTarget(cpu_step, DrafterModel(0.0))
        cluster = SimulatedCluster([], target, draft__method="ngram", draft__placement="target")
        async with cluster.coordinator:
            await cluster.serve(equal_requests(8, 48, "first"))
            decided.clear()
            begun = len(target.batches)
            await cluster.serve(equal_requests(8, 200))
        return len(target.batches) - begun

    rounds = simulate(scenario())
    assert rounds >= 200
    assert len(decided) < rounds / 2
