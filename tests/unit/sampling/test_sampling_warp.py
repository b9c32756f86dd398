"""Warping is correct for each parameter alone and for all together, and is independent of the batch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from tests.support.models.sampling_reference import nucleus_is_near_its_edge, probabilities, shifted
from workers.sampling import truncate
from workers.sampling.context import DecisionContext, tree_contexts
from workers.sampling.decide import decide
from workers.sampling.warp import warp

INF = math.inf
VOCABULARY = 12

LOGITS = st.lists(st.integers(-40, 40).map(lambda step: step / 8), min_size=VOCABULARY, max_size=VOCABULARY)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)
SAMPLINGS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.91, 0.47, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.061]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4]),
    logit_bias=st.sampled_from([(), ((2, -100.0), (5, 3.0))]),
)
CONTEXTS = st.builds(DecisionContext, SAMPLINGS, TOKENS, st.just(1))


def context(tokens: tuple[int, ...] = (0,), prompt_len: int = 1, **sampling: object) -> DecisionContext:
    return DecisionContext(SamplingParameters(**sampling), tokens, prompt_len)  # type: ignore[arg-type]


def warped(logits: list[float], decision: DecisionContext) -> list[float]:
    return warp(torch.tensor([logits]), [decision])[0].tolist()


def kept(logits: list[float], **sampling: object) -> list[int]:
    return [token for token, value in enumerate(warped(logits, context(**sampling))) if value > -INF]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    assert warped([2.0, -2.0, 2.0, 1.0], context((0, 1), 1, repetition_penalty=2.0)) == [1.0, -4.0, 2.0, 1.0]


def test_presence_counts_once_and_only_the_answer() -> None:
    assert warped([1.0, 1.0, 1.0], context((0, 0, 1, 1), 2, presence_penalty=0.5)) == [1.0, 0.5, 1.0]


def test_frequency_counts_each_occurrence_in_the_answer() -> None:
    assert warped([1.0, 1.0, 1.0], context((0, 0, 1, 1), 2, frequency_penalty=0.5)) == [1.0, 0.0, 1.0]


def test_bias_is_added_after_penalties() -> None:
    decision = context((0,), 1, repetition_penalty=2.0, logit_bias=((0, 4.0), (1, -1.0)))
    assert warped([2.0, 2.0], decision) == [5.0, 1.0]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"temperature": 0.5, "top_k": 1}], ids=str)
def test_tokens_that_end_the_answer_are_excluded_before_its_minimal_length(sampling: dict[str, float]) -> None:
    limits = {"end_token_ids": (0, 3, 99), "min_tokens": 2, **sampling}
    for answer, best in (((), 1), ((1,), 1), ((1, 1), 0), ((1, 1, 1), 0)):
        row = warped([3.0, 2.0, 1.0, 2.5], context((5, *answer), 1, **limits))
        assert row.index(max(row)) == best
        assert (row[0] == -INF) == (best == 1)
    assert warped([3.0, 2.0, 1.0, 2.5], context((5,), 1, end_token_ids=(0,))) == [3.0, 2.0, 1.0, 2.5]


def test_the_minimal_length_holds_at_each_node_of_a_draft_tree() -> None:
    sampling = SamplingParameters(temperature=0.0, end_token_ids=(0,), min_tokens=3)
    contexts = tree_contexts(sampling, (7, 8, 9), 2, TokenTree((1, 1, 1, 2), (-1, 0, 1, -1)))  # one answer token
    assert [context.excluded_tokens for context in contexts] == [(0,), (0,), (), (), (0,)]


def test_temperature_divides() -> None:
    assert warped([1.0, -3.0], context(temperature=0.5)) == [2.0, -6.0]


def test_top_k_keeps_exactly_k_tokens_and_prefers_the_lower_among_equals() -> None:
    assert kept([1.0, 3.0, 1.0, 1.0, 2.0], top_k=3) == [0, 1, 4]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert kept([1.0, 2.0, 3.0], top_k=50) == [0, 1, 2]


def test_top_p_keeps_the_fewest_that_reach_its_mass() -> None:
    logits = [math.log(probability) for probability in (0.1, 0.5, 0.15, 0.25)]
    assert kept(logits, top_p=0.49) == [1]
    assert kept(logits, top_p=0.51) == [1, 3]
    assert kept(logits, top_p=0.76) == [1, 2, 3]
    assert kept(logits, top_p=0.95) == [0, 1, 2, 3]


def test_top_p_prefers_the_lower_tokens_among_equals() -> None:
    assert kept([0.0] * 10, top_p=0.35) == [0, 1, 2, 3]


def test_top_p_counts_the_mass_within_top_k() -> None:
    logits = [math.log(probability) for probability in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_k=2, top_p=0.55) == [0]  # 0.4 of 0.7 reaches top-p
    assert kept(logits, top_p=0.55) == [0, 1]


def test_the_smallest_top_p_keeps_the_most_probable_token() -> None:
    assert kept([1.0, 2.0, 0.0], top_p=1e-9) == [1]


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    logits = [math.log(probability) for probability in (0.5, 0.26, 0.2, 0.04)]
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=1.0) == [0]


def test_excluded_tokens_do_not_come_back_through_top_k() -> None:
    assert kept([-INF, 1.0, -INF, 0.0], top_k=3) == [1, 3]


def test_a_greedy_row_is_not_truncated() -> None:
    assert warped([1.0, 2.0], context(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)) == [1.0, 2.0]


def test_a_nucleus_wider_than_the_first_candidates_is_found_completely() -> None:
    logits = torch.linspace(0, 1e-3, 5000)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    result = warp(torch.stack([logits, logits * 1e5]), [context(top_p=0.9), context(top_p=0.9)])
    wide, narrow = (result > -INF).sum(dim=1).tolist()
    assert abs(wide - 4500) < 10
    assert 1 <= narrow < truncate._CANDIDATES
    assert (logits[result[0] > -INF].min() > logits[result[0] == -INF].max()).item()


def test_nan_counts_as_impossible_and_infinity_as_certain() -> None:
    assert kept([math.nan, 1.0, INF, -INF], top_p=0.5) == [2]
    assert warped([math.nan, 1.0], context()) == [-INF, 1.0]


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e6])
def test_no_repetition_penalty_makes_a_logit_infinite(penalty: float) -> None:
    """Truncation subtracts logits, and a difference of infinite ones is no number."""
    decision = context((0, 1), repetition_penalty=penalty, temperature=1e-5, top_p=0.9)
    logits = torch.zeros(1, 600)
    logits[0, :3] = torch.tensor([9.0, -3.0, 1.0])
    assert (warp(logits, [decision]) < INF).all()
    assert decide(logits, [decision]) == [2 if penalty > 1.0 else 0]


def test_a_row_without_candidates_stays_empty_and_affects_no_other() -> None:
    rows = torch.tensor([[math.nan, -INF, -INF], [1.0, 2.0, 3.0]])
    result = warp(rows, [context(top_p=0.5, min_p=0.1, temperature=0.7)] * 2)
    assert result[0].tolist() == [-INF] * 3
    assert result[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_callers_logits_are_never_changed(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 6).to(dtype)
    before = logits.clone()
    warp(logits, [context((1,), 0, temperature=0.5, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0), context()])
    assert torch.equal(logits, before)


def test_rows_without_parameters_are_returned_unchanged() -> None:
    logits = torch.randn(2, 6)
    assert warp(logits, [context(), context(temperature=0.0)]) is logits


def test_a_shard_ignores_tokens_of_other_shards() -> None:
    decision = context((0, 3, 5), 1, presence_penalty=1.0, repetition_penalty=2.0, logit_bias=((4, 1.0), (9, 1.0)))
    logits = torch.randn(1, 6)
    whole = warp(logits, [decision])
    parts = [warp(logits[:, first : first + 2], [decision], offset=first) for first in (0, 2, 4)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_one_context_per_row_is_required() -> None:
    with pytest.raises(ValueError, match="1 contexts for 2 rows"):
        warp(torch.zeros(2, 3), [context()])


def test_relative_masses_are_exponentials() -> None:
    gaps = torch.linspace(-27, 0, 10_001)
    measured = truncate.relative_masses(gaps).double() * 2.0**-40
    assert ((measured - gaps.double().exp()).abs() <= gaps.double().exp() * 4e-6 + 2.0**-40).all()
    assert measured[-1] == 1.0


@settings(deadline=None)
@given(LOGITS, CONTEXTS)
def test_warping_equals_the_slow_reference(logits: list[float], decision: DecisionContext) -> None:
    sampling = decision.sampling
    expected = probabilities(logits, sampling, decision.tokens, decision.prompt_len)
    if sampling.temperature == 0:
        moved = shifted(logits, sampling, decision.tokens, decision.prompt_len)
        assert warped(logits, decision) == pytest.approx(moved, rel=1e-5, abs=1e-5)
        return
    untruncated = SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
    )
    assume(not _has_near_ties(shifted(logits, sampling, decision.tokens, decision.prompt_len)))
    within_top_k = probabilities(logits, untruncated, decision.tokens, decision.prompt_len)
    assume(not nucleus_is_near_its_edge(within_top_k, sampling.top_p))
    measured = torch.tensor(warped(logits, decision)).softmax(dim=0).tolist()
    assert measured == pytest.approx(expected, rel=1e-4, abs=1e-7)


def _has_near_ties(values: list[float]) -> bool:
    """Whether two logits are equal in one precision and different in the other."""
    ordered = sorted(values)
    return any(0 < high - low < 1e-4 for low, high in pairwise(ordered))


@settings(deadline=None)
@given(st.lists(st.tuples(LOGITS, CONTEXTS), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_is_warped_equally_alone_and_in_any_batch(
    rows: list[tuple[list[float], DecisionContext]], random
) -> None:
    random.shuffle(rows)
    together = warp(torch.tensor([logits for logits, _ in rows]), [decision for _, decision in rows])
    for row, (logits, decision) in enumerate(rows):
        assert together[row].tolist() == warped(logits, decision)
