"""Candidates of greedy rows, found in one look, are those of the general way."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.core.request import SamplingParameters
from workers.draft.model.model_expander import GreedyCandidates
from workers.forward.native.largest import largest_by_torch, load_largest
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext

SIZE = 300
VOCABULARY = torch.arange(SIZE) * 3 + 1
GREEDY = SamplingParameters(temperature=0.0)


def contexts(*samplings: SamplingParameters) -> list[DecisionContext]:
    return [DecisionContext(sampling, (5, 7, 9), 1) for sampling in samplings]


def logits_of(rows: int, *, ties: bool = False) -> torch.Tensor:
    drawn = 4 * torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(3))
    return drawn.round() if ties else drawn


@pytest.fixture(params=["kernel", "torch"])
def largest(request: pytest.FixtureRequest) -> object:
    return load_largest(torch.device("cpu"), None) if request.param == "kernel" else largest_by_torch


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "reduced"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_they_are_those_of_the_general_way(vocabulary: torch.Tensor | None, ties: bool) -> None:
    logits = logits_of(3, ties=ties)
    best = [int(index) for index in logits[1].topk(2).indices]
    tokens = best if vocabulary is None else [int(vocabulary[index]) for index in best]
    rows = contexts(
        GREEDY,
        SamplingParameters(temperature=0.0, bad_words=tuple((token,) for token in tokens)),
        SamplingParameters(temperature=0.0, min_tokens=9, end_token_ids=(tokens[0], 2)),
    )
    found = GreedyCandidates(load_largest(torch.device("cpu"), None), vocabulary).of(logits, rows, 3)
    expected = candidates(logits, rows, 3, vocabulary)
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        assert [candidate.token for candidate in one] == [candidate.token for candidate in other]
        for candidate, same in zip(one, other, strict=True):
            assert candidate.probability == pytest.approx(same.probability, rel=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=0.7),
        SamplingParameters(temperature=0.0, repetition_penalty=1.2),
        SamplingParameters(temperature=0.0, logit_bias=((3, 1.0),)),
        SamplingParameters(temperature=0.0, allowed_token_ids=(3, 4)),
    ],
)
def test_rows_that_need_all_logits_go_the_general_way(sampling: SamplingParameters, largest: object) -> None:
    finder = GreedyCandidates(largest, None)  # type: ignore[arg-type]
    assert finder.of(logits_of(2), contexts(GREEDY, sampling), 3) is None


def test_rows_without_a_likely_candidate_go_the_general_way(largest: object) -> None:
    finder = GreedyCandidates(largest, None)  # type: ignore[arg-type]
    nothing = torch.full((1, SIZE), math.nan)
    assert finder.of(nothing, contexts(GREEDY), 3) is None
    one = torch.zeros(1, SIZE)
    one[0, 4] = 100.0
    assert finder.of(one, contexts(SamplingParameters(temperature=0.0, bad_words=((4,),))), 3) is None
