"""Candidates: first the decision, then each decision without the previous ones, with the draft's confidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.request import SamplingParameters
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide
from workers.sampling.noise import gumbel, gumbel_of
from workers.sampling.warp import warp

INF = math.inf
VOCABULARY = 24
GREEDY = SamplingParameters(temperature=0.0)
SAMPLINGS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (11, -100.0))]),
    end_token_ids=st.sampled_from([(), (3, 12)]),
    min_tokens=st.sampled_from([0, 4]),
    seed=st.integers(0, 2**64 - 1),
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)
CONTEXTS = st.lists(st.builds(DecisionContext, SAMPLINGS, TOKENS, st.just(1)), min_size=1, max_size=5)


def coarse(rows: int, seed: int, size: int = VOCABULARY) -> torch.Tensor:
    """Logits of which many are equal: float32 [rows, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (rows, size), generator=generator) / 4


@settings(deadline=None)
@given(CONTEXTS, st.integers(0, 2**32))
def test_each_candidate_is_the_decision_without_the_previous_candidates(
    contexts: list[DecisionContext], seed: int
) -> None:
    logits = coarse(len(contexts), seed)
    for row, found in enumerate(candidates(logits, contexts, 4)):
        scores = warp(logits[row : row + 1], [contexts[row]])[0].clone()
        if not contexts[row].is_greedy:
            scores += gumbel([contexts[row].sampling.seed], [contexts[row].position], 0, VOCABULARY, "cpu")[0]
        assert found[0].token == decide(logits[row : row + 1], [contexts[row]])[0]
        for candidate in found:
            assert candidate.token == int(scores.argmax())  # the first among equals
            scores[candidate.token] = -INF
        assert len(found) == 4 or bool((scores == -INF).all())


@settings(deadline=None)
@given(CONTEXTS, st.sets(st.integers(0, VOCABULARY - 1), min_size=1), st.integers(0, 2**32))
def test_a_reduced_vocabulary_equals_the_full_one_with_all_other_tokens_excluded(
    contexts: list[DecisionContext], kept: set[int], seed: int
) -> None:
    vocabulary = torch.tensor(sorted(kept))
    reduced = coarse(len(contexts), seed, len(vocabulary))
    whole = torch.full((len(contexts), VOCABULARY), -INF)
    whole[:, vocabulary] = reduced
    found, expected = candidates(reduced, contexts, 3, vocabulary), candidates(whole, contexts, 3)
    assert [[one.token for one in row] for row in found] == [[one.token for one in row] for row in expected]
    for one, other in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert one.probability == pytest.approx(other.probability, rel=1e-5)


def test_confidence_is_the_softmax_of_the_deciding_logits() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(2))
    contexts = [DecisionContext(GREEDY, (1,), 1), DecisionContext(SamplingParameters(temperature=0.5, seed=9), (1,), 1)]
    greedy, drawn = candidates(logits, contexts, 3)
    expected = logits[0].softmax(dim=0)
    assert [one.probability for one in greedy] == pytest.approx([float(expected[one.token]) for one in greedy])
    perturbed = (logits[1] / 0.5 + gumbel([9], [1], 0, 500, "cpu")[0]).softmax(dim=0)
    assert [one.probability for one in drawn] == pytest.approx([float(perturbed[one.token]) for one in drawn])


def test_penalties_are_applied_before_confidence() -> None:
    sampling = replace(GREEDY, logit_bias=((0, 3.0),))
    ((first, second),) = candidates(torch.zeros(1, 2), [DecisionContext(sampling, (0,), 1)], 2)
    assert (first.token, second.token) == (0, 1)
    assert first.probability == pytest.approx(1 / (1 + math.exp(-3.0)))
    assert second.probability == pytest.approx(1 - first.probability)


def test_a_nan_row_has_no_candidates_and_affects_no_other() -> None:
    logits = torch.tensor([[math.nan, -INF, math.nan], [-INF, 1.0, math.nan], [0.0, 1.0, 2.0]])
    nothing, one, all_three = candidates(logits, [DecisionContext(GREEDY, (0,), 1)] * 3, 5)
    assert nothing == ()
    assert [(candidate.token, candidate.probability) for candidate in one] == [(1, 1.0)]
    assert [candidate.token for candidate in all_three] == [2, 1, 0]


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    candidates(logits, [DecisionContext(SamplingParameters(top_p=0.5, seed=1), (0,), 1)] * 2, 4)
    assert torch.equal(logits, before)


def test_one_context_per_row_is_required() -> None:
    with pytest.raises(ValueError, match="1 contexts for 2 rows"):
        candidates(torch.zeros(2, 3), [DecisionContext(GREEDY, (0,), 1)], 1)


def test_noise_at_some_tokens_equals_that_of_the_whole_vocabulary() -> None:
    tokens = torch.tensor([0, 3, 4, 700, 49_151])
    seeds, positions = [5, 2**64 - 1], [0, 1000]
    assert torch.equal(
        gumbel_of(seeds, positions, tokens, "cpu"), gumbel(seeds, positions, 0, 49_152, "cpu")[:, tokens]
    )


@pytest.mark.parametrize("tokens", [[-1, 4], [0, 1 << 31]])
def test_tokens_without_noise_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="31-bit"):
        gumbel_of([1], [1], torch.tensor(tokens), "cpu")
