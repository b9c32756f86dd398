"""Log-probabilities of the model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from cluster.wire.codec.common import decode_logprobs, encode_logprobs
from workers.sampling import logprobs
from workers.sampling.logprobs import LEAST_LOGPROB, log_sums_by_halves, token_logprobs

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


def one_by_one(
    row: torch.Tensor, token: int, count: int, listed: Sequence[int]
) -> tuple[float, int, list[tuple[int, float]]]:
    """The log-probability of a row's token, its rank, and what is reported beside it, by a stable sort of the row."""
    clean = row.double().nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
    order = clean.sort(descending=True, stable=True).indices.tolist()
    total = clean.logsumexp(dim=0)
    shown = sorted(listed, key=lambda one: -float(clean[one])) if listed else order[:count]

    def of(one: int) -> float:
        found = float(clean[one] - total)
        return min(found, 0.0) if found > LEAST_LOGPROB else LEAST_LOGPROB

    return of(token), 1 + order.index(token), [(one, of(one)) for one in shown]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_all_rows_together_have_the_bits_of_each_row_sorted_by_itself(
    dtype: torch.dtype, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", 3 * 1003)
    logits = (5 * torch.randn(9, 1003, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[1] = logits[1].round()  # many are equal
    logits[2, ::3], logits[2, 1::3] = 0.0, -0.0
    logits[3, 7:9], logits[3, 20], logits[4, 11] = math.inf, math.nan, -math.inf
    logits[5] = -math.inf
    tokens = [4, 900, 1, 8, 11, 0, 1002, 5, 6]
    counts = [0, 20, 400, 3, 2000, 2, 1, 0, 5]
    listed: list[list[int]] = [[], [], [], [], [], [], [9, 3, 3, 1002], [], [7]]
    pieces = [logits[:1], logits[1:1], logits[1:6], logits[6:]] if in_pieces else logits
    found = token_logprobs(pieces, tokens, counts, listed)
    assert [(one.token, (one.logprob, one.rank, list(one.top))) for one in found] == [
        (token, one_by_one(row, token, count, names))
        for row, token, count, names in zip(logits, tokens, counts, listed, strict=True)
    ]


def test_the_numbers_of_all_rows_at_once_have_the_bits_of_each_row_by_itself() -> None:
    logits = 5 * torch.randn(5, 1003, generator=torch.Generator().manual_seed(3))
    logits[1] = logits[1].round()
    logits[2, ::3], logits[2, 1::3] = 0.0, -0.0
    logits[3], logits[4, 5:9], logits[4, 20:] = -math.inf, math.inf, math.nan
    tokens = [4, 900, 1, 8, 7]
    listed = torch.tensor([[3, 3], [1002, 0], [0, 1], [5, 4], [20, 6]])
    for count in (0, 1, 7, 400, 1003):
        together = logprobs.numbers_together(logits, torch.tensor(tokens), count, listed)
        assert torch.equal(together, logprobs._numbers(logits, tokens, count, listed))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reports_the_same_tokens_ranks_and_probabilities(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(70, 128256, generator=torch.Generator().manual_seed(4))).to(dtype)
    logits[0] = 0.0
    tokens, counts = [7 * row for row in range(70)], [row % 30 for row in range(70)]
    listed = [[9, 3] if row % 9 == 0 else [] for row in range(70)]
    found = token_logprobs(logits.cuda(), tokens, counts, listed)
    for ours, theirs in zip(found, token_logprobs(logits, tokens, counts, listed), strict=True):
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-12)
    alone = [
        token_logprobs(logits[row : row + 1].cuda(), [tokens[row]], [counts[row]], [listed[row]])[0]
        for row in (0, 5, 69)
    ]
    assert alone == [found[row] for row in (0, 5, 69)]


def test_sums_of_a_gpu_do_not_depend_on_neighbours_and_are_close_to_those_of_a_cpu() -> None:
    logits = 9 * torch.randn(6, 1001, generator=torch.Generator().manual_seed(2)).double()
    logits[1], logits[2, 1:] = -math.inf, -math.inf
    together = log_sums_by_halves(logits)
    for row in range(len(logits)):
        assert torch.equal(log_sums_by_halves(logits[row : row + 1]), together[row : row + 1])
    torch.testing.assert_close(together, logits.logsumexp(dim=1), rtol=1e-14, atol=1e-14)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 4 is outside the vocabulary of 4"):
        token_logprobs(LOGITS[:1], [4], [0])
    with pytest.raises(ValueError, match="token 5 is outside the vocabulary of 4"):
        token_logprobs(LOGITS, [0, 1], [0, 0], [[], [5]])


def test_one_token_and_count_per_row_are_required() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 tokens"):
        token_logprobs(LOGITS, [0], [0, 0])
    with pytest.raises(ValueError, match="2 rows of logits, 2 tokens, 2 counts and 1 lists of tokens"):
        token_logprobs(LOGITS, [0, 0], [0, 0], [[1]])
    assert token_logprobs([], [], []) == ()


def test_the_rank_is_that_among_all_tokens_also_where_no_alternatives_are_reported() -> None:
    ranks = [token_logprobs(LOGITS, [token, token], [0, 2]) for token in range(4)]
    assert [first.rank for first, _ in ranks] == [4, 1, 3, 2]
    assert [second.rank for _, second in ranks] == [1, 2, 3, 4]  # of equal tokens, the lower id comes first
    (impossible,) = token_logprobs(torch.tensor([[0.0, -math.inf, math.nan]]), [2], [1], listed=[[1]])
    assert impossible.rank == 3
