"""Ranks that share a KV head divide the query heads that read it, also where these do not divide evenly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from cluster.core.errors import ConfigurationError
from workers.model.head_counts import describe_shared_heads, most_held, ranks_that_divide
from workers.model.share import Share

QWEN = (28, 4)
"""Query heads and KV heads of Qwen2.5-7B."""


def test_ranks_divide_the_kv_heads_or_are_a_multiple_of_them() -> None:
    assert ranks_that_divide(*QWEN) == [1, 2, 4, 8, 12, 16, 20, 24, 28]
    assert ranks_that_divide(6, 3) == [1, 3, 6]
    assert ranks_that_divide(6, 6) == [1, 2, 3, 6]
    assert ranks_that_divide(5, 1) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12, 24, 28])
def test_each_query_head_is_on_one_rank_which_holds_its_kv_head(ranks: int) -> None:
    heads, kv_heads = QWEN
    shares = [Share(rank, ranks) for rank in range(ranks)]
    own = [range(heads)[share.query_heads(*QWEN)] for share in shares]
    assert [head for part in own for head in part] == list(range(heads))
    assert {len(part) for part in own} <= {heads // ranks, -(-heads // ranks)}
    for share, part in zip(shares, own, strict=True):
        assert {head // (heads // kv_heads) for head in part} == set(range(kv_heads)[share.kv_heads(kv_heads)])


@pytest.mark.parametrize("ranks", [3, 32])
def test_other_numbers_of_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{ranks} does not divide num_attention_heads = 28"):
        Share(0, ranks).query_heads(*QWEN)


def test_matrices_are_counted_on_the_rank_that_has_most_heads() -> None:
    assert most_held(*QWEN, 8)["q_proj"] == most_held(*QWEN, 8)["o_proj"] == Fraction(4, 28)
    assert most_held(*QWEN, 8)["k_proj"] == most_held(*QWEN, 8)["v_proj"] == Fraction(1, 4)
    assert set(most_held(*QWEN, 2).values()) == {Fraction(1, 2)}


@pytest.mark.parametrize(("counts", "ranks", "told"), [
    (QWEN, 8, "8 ranks hold 4 KV heads, each on 2 of them: a rank has 3 or 4 of 28 query heads; memory is counted for "
     "4"),
    ((32, 4), 8, "8 ranks hold 4 KV heads, each on 2 of them: a rank has 4 of 32 query heads"),
    (QWEN, 4, None),
    (QWEN, 9, None),
])  # fmt: skip
def test_it_is_told_how_ranks_share_kv_heads(counts: tuple[int, int], ranks: int, told: str | None) -> None:
    assert describe_shared_heads(*counts, ranks) == told
