"""Computation by drafters counts once a step or once a token, and never without drafts."""

from __future__ import annotations

from deploy.bench.contestants.answers import BenchAnswer, BenchPass
from deploy.bench.measuring import measures
from deploy.bench.measuring.results import Cost


def test_passes_over_all_depths_count_once_a_step_and_never_without_drafts() -> None:
    cost = Cost(draft_flops=1.0, draft_step_flops=100.0, draft_committed_flops=1000.0)
    answer = BenchAnswer(tuple(range(8)), (), 8, 5, 4, True)
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {"proposed_tokens": 12.0})]) == 12 + 400 + 8000
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {"proposed_tokens": 3.0})]) == 3 + 300 + 8000
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {})]) == 0.0
