"""Log-probabilities of the model's own distribution."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.wire.codec.common import decode_logprobs, encode_logprobs
from workers.sampling.logprobs import LEAST_LOGPROB, token_logprobs

LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]).log()


def test_the_token_and_the_most_probable_ones_are_reported() -> None:
    first, _ = token_logprobs(LOGITS, [2, 0], [3, 0])
    assert first.token == 2
    assert first.logprob == pytest.approx(math.log(0.2))
    assert [token for token, _ in first.top] == [1, 3, 2]
    assert [logprob for _, logprob in first.top] == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)])


def test_a_count_of_zero_reports_the_token_alone() -> None:
    _, second = token_logprobs(LOGITS, [2, 3], [3, 0])
    assert second.logprob == pytest.approx(math.log(0.25))
    assert second.top == ()


def test_equal_log_probabilities_are_ordered_by_token() -> None:
    _, second = token_logprobs(LOGITS, [0, 0], [0, 3])
    assert [token for token, _ in second.top] == [0, 1, 2]


def test_a_count_beyond_the_vocabulary_reports_all_of_it() -> None:
    first, _ = token_logprobs(LOGITS, [0, 0], [20, 20])
    assert len(first.top) == 4


def test_logits_need_not_be_normalized() -> None:
    (shifted,) = token_logprobs(LOGITS[:1] + 100, [1], [0])
    assert shifted.logprob == pytest.approx(math.log(0.4), abs=1e-5)


def test_impossible_tokens_have_a_finite_log_probability() -> None:
    (result,) = token_logprobs(torch.tensor([[0.0, -math.inf, math.nan]]), [1], [3])
    assert result.logprob == LEAST_LOGPROB
    assert result.top == ((0, 0.0), (1, LEAST_LOGPROB), (2, LEAST_LOGPROB))


@pytest.mark.parametrize("nothing", [math.nan, -math.inf])
def test_in_a_row_without_any_finite_logit_all_tokens_have_the_least_log_probability(nothing: float) -> None:
    """The other rows of a step do not fail with it: its numbers can be sent."""
    found = token_logprobs(torch.tensor([[nothing] * 3, [0.0, 0.0, 0.0]]), [1, 1], [2, 0])
    assert found[0].logprob == LEAST_LOGPROB
    assert found[0].top == ((0, LEAST_LOGPROB), (1, LEAST_LOGPROB))
    assert found[1].logprob == pytest.approx(math.log(1 / 3))
    assert tuple(decode_logprobs(encode_logprobs(one)) for one in found) == found


def test_a_row_has_the_same_log_probabilities_alone_and_in_a_batch() -> None:
    logits = torch.randn(5, 1001, generator=torch.Generator().manual_seed(0))
    together = token_logprobs(logits, [7] * 5, [4] * 5)
    assert together == tuple(token_logprobs(logits[row : row + 1], [7], [4])[0] for row in range(5))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 4 is outside the vocabulary of 4"):
        token_logprobs(LOGITS[:1], [4], [0])


def test_one_token_and_count_per_row_are_required() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 tokens"):
        token_logprobs(LOGITS, [0], [0, 0])


def test_the_rank_is_that_among_all_tokens_also_where_no_alternatives_are_reported() -> None:
    ranks = [token_logprobs(LOGITS, [token, token], [0, 2]) for token in range(4)]
    assert [first.rank for first, _ in ranks] == [4, 1, 3, 2]
    assert [second.rank for _, second in ranks] == [1, 2, 3, 4]  # of equal tokens, the lower id comes first
    (impossible,) = token_logprobs(torch.tensor([[0.0, -math.inf, math.nan]]), [2], [1], listed=[1])
    assert impossible.rank == 3
